from kvferry.transport.addresses import is_loopback as is_loopback, parse_ip as parse_ip
from kvferry.transport.agent import (
    LEAST_BYTES as LEAST_BYTES,
    SHARED_MEMORY as SHARED_MEMORY,
    Agent as Agent,
    ReadState as ReadState,
    is_local_address as is_local_address,
    make_nixl_agent as make_nixl_agent,
    preload as preload,
)
from kvferry.transport.control_client import ControlClient as ControlClient
from kvferry.transport.control_server import ControlServer as ControlServer
from kvferry.transport.costs import (
    CostsFile as CostsFile,
    TransferSettings as TransferSettings,
    default_costs_path as default_costs_path,
    find_default_costs as find_default_costs,
    load_costs as load_costs,
    write_costs as write_costs,
)
from kvferry.transport.gather_client import (
    GatherClient as GatherClient,
    Gathered as Gathered,
    GatherRoute as GatherRoute,
)
from kvferry.transport.handshake import (
    Address as Address,
    Pending as Pending,
    Unusable as Unusable,
)
from kvferry.transport.lane_connections import ConnectedPeer as ConnectedPeer
from kvferry.transport.lease import (
    LeaseBook as LeaseBook,
    LeaseWord as LeaseWord,
    LeaseWords as LeaseWords,
    new_incarnation as new_incarnation,
)
from kvferry.transport.messages import (
    PROTOCOL as PROTOCOL,
    AskTurn as AskTurn,
    Claim as Claim,
    Facts as Facts,
    Hello as Hello,
    PeerInfo as PeerInfo,
    RankCard as RankCard,
    Refused as Refused,
    Request as Request,
    Turns as Turns,
    compare_facts as compare_facts,
)
from kvferry.transport.offer import MAX_REMOTE_CACHES as MAX_REMOTE_CACHES
from kvferry.transport.read_plan import (
    LoadFigures as LoadFigures,
    ReadOrder as ReadOrder,
    Report as Report,
)
from kvferry.transport.redeem import (
    Grant as Grant,
    PromptContent as PromptContent,
    Redeem as Redeem,
    new_ticket as new_ticket,
)
from kvferry.transport.redemptions import Redemption as Redemption
from kvferry.transport.security import (
    Keys as Keys,
    admin_token as admin_token,
    existing_keys as existing_keys,
    key_location as key_location,
    new_secret as new_secret,
    random_keys as random_keys,
    write_secret as write_secret,
)
from kvferry.transport.sockets import ControlSocket as ControlSocket
from kvferry.transport.staging import LaneResources as LaneResources, StagingArea as StagingArea
from kvferry.transport.transfers import Transfers as Transfers

from kvferry.connector.bids import Bid as Bid, PlaceTokens as PlaceTokens, trim_parts as trim_parts
from kvferry.connector.choosing import (
    LocalPrefix as LocalPrefix,
    last_boundary_before as last_boundary_before,
    saves_computation as saves_computation,
)
from kvferry.connector.config import (
    DEFAULT as DEFAULT,
    NODE as NODE,
    ConnectorConfig as ConnectorConfig,
    Tiers as Tiers,
    parse_config as parse_config,
    read_tenants as read_tenants,
    read_tiers as read_tiers,
    tier_settings as tier_settings,
)
from kvferry.connector.events import (
    Arrived as Arrived,
    DecisionReason as DecisionReason,
    HintKind as HintKind,
    LoadOutcome as LoadOutcome,
    MissReason as MissReason,
    RequestEvent as RequestEvent,
    SourceMiss as SourceMiss,
)
from kvferry.connector.hints import Hints as Hints, parse_hints as parse_hints
from kvferry.connector.loads import Loads as Loads
from kvferry.connector.messages import (
    Load as Load,
    LoadPart as LoadPart,
    Piece as Piece,
    StoreOrder as StoreOrder,
)
from kvferry.connector.mover import ChunkRoutes as ChunkRoutes

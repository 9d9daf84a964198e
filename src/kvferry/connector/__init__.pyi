from kvferry.connector.choosing import (
    LocalPrefix as LocalPrefix,
    last_boundary_before as last_boundary_before,
)
from kvferry.connector.config import (
    DEFAULT as DEFAULT,
    NODE as NODE,
    ConnectorConfig as ConnectorConfig,
    Tiers as Tiers,
    parse_config as parse_config,
    read_tiers as read_tiers,
    tier_settings as tier_settings,
)
from kvferry.connector.events import (
    Arrived as Arrived,
    DecisionReason as DecisionReason,
    MissReason as MissReason,
    RequestEvent as RequestEvent,
    SourceMiss as SourceMiss,
)
from kvferry.connector.load import (
    Bid as Bid,
    Load as Load,
    LoadOutcome as LoadOutcome,
    PlaceTokens as PlaceTokens,
    saves_computation as saves_computation,
    trim_parts as trim_parts,
)
from kvferry.connector.messages import LoadPart as LoadPart, Piece as Piece, StoreOrder as StoreOrder
from kvferry.connector.worker.loads import Loads as Loads
from kvferry.connector.worker.mover import ChunkRoutes as ChunkRoutes

from kvferry.observe.line_file import check_line_file as check_line_file
from kvferry.observe.metrics import (
    COMMON as COMMON,
    CONNECTOR as CONNECTOR,
    EXPOSED as EXPOSED,
    PREFIX as PREFIX,
    ROUTER as ROUTER,
    ROUTER_PREFIX as ROUTER_PREFIX,
    SUFFIXES as SUFFIXES,
    VLLM_PREFIX as VLLM_PREFIX,
    MetricKind as MetricKind,
    series_names as series_names,
)
from kvferry.observe.socket_directory import (
    connect as connect,
    engine_sockets as engine_sockets,
    socket_directories as socket_directories,
)
from kvferry.observe.trace_server import (
    DECODE_ERRORS as DECODE_ERRORS,
    MAX_ANSWER_BYTES as MAX_ANSWER_BYTES,
    MAX_QUESTION_BYTES as MAX_QUESTION_BYTES,
    EngineInfo as EngineInfo,
    Question as Question,
    decode_trace as decode_trace,
    trace_to_dict as trace_to_dict,
)
from kvferry.observe.traces import (
    FIRST_EVENTS as FIRST_EVENTS,
    RequestTrace as RequestTrace,
    StoredChunks as StoredChunks,
)

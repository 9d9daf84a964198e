"""What each engine of a fleet is told."""

import json

import pytest

from kvferry.common.errors import ConfigError
from kvferry.tools.serving.devices import Devices, engine_environments, memory_arguments
from kvferry.tools.serving.kv_config import kv_transfer_config, kv_transfer_json
from kvferry.tools.serving.role import Role
from kvferry.tools.serving.specs import EngineGroup, fleet_specs, group_specs, parallel_of

CPU = Devices(gpus=(), cores=(0, 1, 4, 5))
GPUS = Devices(gpus=("0", "1", "2"), cores=(0, 1))


def bindings(machine, ranks):
    return [env["VLLM_CPU_OMP_THREADS_BIND"] for env in engine_environments(machine, ranks)]


def test_cores_are_shared_out_evenly_over_ranks():
    assert bindings(CPU, [1, 1]) == ["0,1", "4,5"]
    assert bindings(CPU, [1, 2]) == ["0", "1|4"]
    assert engine_environments(CPU, [1, 1])[0]["OMP_NUM_THREADS"] == "2"


def test_cores_are_not_bound_if_ranks_outnumber_them():
    assert bindings(CPU, [2, 3]) == ["nobind", "nobind"]


def test_gpus_are_divided_among_engines_and_shared_if_too_few():
    devices = [env["CUDA_VISIBLE_DEVICES"] for env in engine_environments(GPUS, [1, 2, 2])]
    assert devices == ["0", "1,2", "0,1"]


def test_memory_is_split_only_if_shared_and_not_sized_by_the_user():
    assert memory_arguments(GPUS, [1, 2], ()) == ()
    assert memory_arguments(GPUS, [2, 2], ()) == ("--gpu-memory-utilization", "0.450")
    assert memory_arguments(CPU, [1, 1], ()) == ("--gpu-memory-utilization", "0.250")
    assert memory_arguments(CPU, [1, 1], ("--kv-cache-memory-bytes=5",)) == ()


def test_a_fleet_has_its_own_ports_names_and_roles():
    specs = fleet_specs("m", prefill=2, decode=1, decode_tensor_parallel=2, machine=GPUS)
    assert [spec.name for spec in specs] == ["prefill-0", "prefill-1", "decode-0"]
    assert len({spec.port for spec in specs}) == 3
    assert [spec.kv_transfer["kv_role"] for spec in specs] == ["kv_producer", "kv_producer", "kv_consumer"]
    assert [spec.tensor_parallel for spec in specs] == [1, 1, 2]


def test_an_engines_command_carries_its_connector_and_the_users_arguments_last():
    *_, spec = fleet_specs(
        "m", decode_settings={"attempts": 3}, arguments=["--dtype", "float32"], machine=GPUS
    )
    command = spec.command()
    given = json.loads(command[command.index("--kv-transfer-config") + 1])
    assert given["kv_connector_extra_config"].items() >= {"attempts": 3}.items()
    assert command[-2:] == ["--dtype", "float32"]


def test_engines_that_serve_alone_have_tiers_and_shares_of_the_machine():
    tiers = [{"type": "host", "capacity": "8MiB"}]
    group = EngineGroup(role=Role.BOTH, count=2, tensor_parallel=2, settings={"tiers": tiers})
    specs = group_specs("m", [group], CPU)
    assert [spec.name for spec in specs] == ["engine-0", "engine-1"]
    assert {spec.kv_transfer["kv_role"] for spec in specs} == {"kv_both"}
    assert specs[0].kv_transfer["kv_connector_extra_config"] == {"tiers": tiers}
    assert [spec.tensor_parallel for spec in specs] == [2, 2]
    assert specs[0].arguments == ("--gpu-memory-utilization", "0.125")


def test_arguments_of_a_role_are_for_its_engines_only():
    groups = [
        EngineGroup(role=Role.PREFILL, arguments=["--kv-cache-memory-bytes=5"]),
        EngineGroup(role=Role.DECODE, arguments=["-dp", "2"]),
    ]
    prefill, decode = group_specs("m", groups, CPU)
    assert prefill.arguments == ("--kv-cache-memory-bytes=5",)
    assert decode.arguments == ("--gpu-memory-utilization", "0.167", "-dp", "2")
    assert decode.environment["VLLM_CPU_OMP_THREADS_BIND"] == "1|4"


@pytest.mark.parametrize(
    ("arguments", "ranks"),
    [
        ((), 2),
        (("--data-parallel-size", "2"), 4),
        (("-dp", "2", "--pipeline_parallel_size=3"), 12),
        (("-dp=2", "-dp", "3"), 6),
        (("-pcp", "2"), 4),
        (("--decode-context-parallel-size", "2"), 2),
        (("--data-parallel-size", "8", "--data-parallel-size-local=2"), 4),
    ],
    ids=str,
)
def test_every_parallel_size_of_this_machine_counts(arguments, ranks):
    assert parallel_of(2, arguments).workers == ranks


def test_each_rank_of_each_replica_gets_a_device():
    many = Devices(gpus=tuple("01234567"), cores=(0,))
    specs = fleet_specs("m", arguments=["-dp", "2"], decode_tensor_parallel=2, machine=many)
    assert [spec.environment["CUDA_VISIBLE_DEVICES"] for spec in specs] == ["0,1", "2,3,4,5"]
    assert [spec.tensor_parallel for spec in specs] == [1, 2]
    cores = Devices(gpus=(), cores=tuple(range(12)))
    specs = fleet_specs("m", arguments=["-dp", "2"], decode_tensor_parallel=2, machine=cores)
    bound = [spec.environment["VLLM_CPU_OMP_THREADS_BIND"] for spec in specs]
    assert bound == ["0,1|2,3", "4,5|6,7|8,9|10,11"]
    assert specs[0].arguments[:2] == ("--gpu-memory-utilization", "0.083"), "half, over six ranks"


def test_an_engine_of_more_ranks_than_gpus_is_refused():
    with pytest.raises(ConfigError, match=r"decode-0 needs 4 GPUs \(tensor 2 x data 2\), 3 can be used here"):
        fleet_specs("m", arguments=["-dp", "2"], decode_tensor_parallel=2, machine=GPUS)


@pytest.mark.parametrize("value", ["0", "two", ""])
def test_a_parallel_size_that_is_none_is_refused(value):
    with pytest.raises(ConfigError, match="it must be a whole number of at least 1"):
        fleet_specs("m", arguments=["-pp", value], machine=GPUS)


@pytest.mark.parametrize("argument", ["--port", "--port=3", "--tensor_parallel_size=2", "-tp"])
def test_an_argument_that_cannot_be_the_same_for_all_is_refused(argument):
    with pytest.raises(ConfigError, match="cannot be the same for every engine"):
        fleet_specs("m", arguments=[argument], machine=GPUS)


@pytest.mark.parametrize("name", ["prefill", "decode", "prefill_tensor_parallel", "decode_tensor_parallel"])
def test_a_fleet_without_an_engine_or_a_rank_is_refused(name):
    with pytest.raises(ConfigError, match="it must be at least 1"):
        fleet_specs("m", machine=GPUS, **{name: 0})


def test_missing_model_folder_is_refused():
    with pytest.raises(ConfigError, match=r"there is no model at \./nowhere"):
        fleet_specs("./nowhere", machine=GPUS)


def test_connector_config_holds_only_given_settings():
    config = kv_transfer_config(Role.BOTH, {"port": 5, "host": None})
    assert config["kv_connector_extra_config"] == {"port": 5}
    assert config["kv_load_failure_policy"] == "recompute"
    assert "\n" not in kv_transfer_json(config)
    assert json.loads(kv_transfer_json(config)) == config


def test_an_unknown_connector_setting_is_refused_with_the_nearest_one():
    with pytest.raises(ConfigError, match="lease_seconds"):
        kv_transfer_config(Role.BOTH, {"lease_second": 5})


def test_decode_engines_of_a_fleet_meet_its_prefill_engines_at_their_start():
    *prefills, decode, other = (
        spec.kv_transfer["kv_connector_extra_config"]
        for spec in fleet_specs("m", prefill=2, decode=2, machine=GPUS)
    )
    ports = [one["port"] for one in prefills]
    assert len(set(ports)) == 2
    assert decode == other == {"peers": ["localhost", *(f"127.0.0.1:{port}" for port in ports)]}


@pytest.mark.parametrize(
    "options",
    [
        {"prefill_settings": {"port": 5}},
        {"decode_settings": {"ports": "20000-20099"}},
        {"arguments": ["-dp", "2"]},
    ],
    ids=["port", "ports", "data parallel"],
)
def test_engines_with_addresses_of_their_own_meet_at_the_first_ticket(options):
    specs = fleet_specs("m", machine=Devices(gpus=tuple("01234567"), cores=(0,)), **options)
    for spec, side in zip(specs, ("prefill", "decode"), strict=True):
        assert spec.kv_transfer["kv_connector_extra_config"] == options.get(f"{side}_settings", {})

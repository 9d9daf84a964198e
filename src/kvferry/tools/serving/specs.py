"""Choose the engines of a fleet: names, ports, devices and connector settings."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvferry.common.errors import ConfigError, KVFerryError
from kvferry.tools.serving.devices import (
    Devices,
    engine_environments,
    free_ports,
    memory_arguments,
    visible_devices,
)
from kvferry.tools.serving.engine import EngineSpec
from kvferry.tools.serving.kv_config import kv_transfer_config
from kvferry.tools.serving.machine_checks import check_attention, check_path, value_of
from kvferry.tools.serving.role import Role

# Arguments of vLLM that differ between the engines, and the settings to use in place of them.
_OURS = {
    "--model": "MODEL",
    "--host": "kvferry's own --host, before the --",
    "--port": "kvferry's own --port, before the --",
    "--tensor-parallel-size": "--tp, or --prefill-tp and --decode-tp, before the --",
    "-tp": "--tp, or --prefill-tp and --decode-tp, before the --",
    "--kv-transfer-config": "kvferry router with engines of your own",
    "--kv-offloading-size": "--tiers, before the --: it would replace kvferry's connector",
}
# A user who names addresses of engines lets them meet in another way.
_ADDRESSES = ("host", "port", "ports", "advertise_host", "peers")


@dataclass(frozen=True, slots=True)
class Parallel:
    """The number of workers that an engine runs on this machine, by the kind of parallelism.

    >>> Parallel(tensor=2, data=2).workers
    4

    Attributes:
        context: prefill-context-parallel size. Decode context parallelism uses the tensor-parallel workers,
            and adds none.
        data: number of data-parallel replicas on this machine.
    """

    tensor: int
    pipeline: int = 1
    context: int = 1
    data: int = 1

    @property
    def workers(self) -> int:
        """Number on this machine. Each needs a device."""
        return self.tensor * self.pipeline * self.context * self.data

    def __str__(self) -> str:
        """Return the sizes above 1 as text, such as ``tensor 2 x data 2``; ``1 rank`` if all are 1."""
        return " x ".join(f"{name} {size}" for name, size in asdict(self).items() if size > 1) or "1 rank"


def parallel_of(tensor: int, arguments: Sequence[str]) -> Parallel:
    """Return an engine's parallel sizes from its arguments. Raise ConfigError unless whole and at least 1."""
    pipeline = _size(arguments, "--pipeline-parallel-size", "-pp")
    context = _size(arguments, "--prefill-context-parallel-size", "-pcp")
    data = _size(arguments, "--data-parallel-size", "-dp")
    # Of several machines, this one runs only some of the replicas.
    local = _size(arguments, "--data-parallel-size-local", "-dpl")
    return Parallel(tensor, pipeline or 1, context or 1, local or data or 1)


def _size(arguments: Sequence[str], *names: str) -> int | None:
    value = value_of(arguments, *names)
    if value is None:
        return None
    if not value.isdecimal() or int(value) < 1:
        raise ConfigError(f"{names[0]} is {value!r}, it must be a whole number of at least 1")
    return int(value)


@dataclass(frozen=True, slots=True)
class EngineGroup:
    """Engines of a fleet that are alike.

    Attributes:
        settings: connector settings, by their names in `ConnectorConfig`; None for the default values.
        arguments: arguments of vLLM's API server for these engines, such as other parallel sizes.
    """

    role: Role
    count: int = 1
    tensor_parallel: int = 1
    settings: Mapping[str, Any] | None = None
    arguments: Sequence[str] = ()

    @property
    def name(self) -> str:
        return "engine" if self.role is Role.BOTH else self.role.value

    @property
    def parallel(self) -> Parallel:
        return parallel_of(self.tensor_parallel, self.arguments)


def fleet_specs(
    model: str,
    *,
    prefill: int = 1,
    decode: int = 1,
    prefill_tensor_parallel: int = 1,
    decode_tensor_parallel: int = 1,
    prefill_settings: Mapping[str, Any] | None = None,
    decode_settings: Mapping[str, Any] | None = None,
    arguments: Sequence[str] = (),
    machine: Devices | None = None,
) -> tuple[EngineSpec, ...]:
    """Return the specifications of prefill engines and decode engines on this machine, in this order.

    Settings, arguments, devices and errors are as in `EngineGroup` and `group_specs`.
    """
    groups = (
        EngineGroup(Role.PREFILL, prefill, prefill_tensor_parallel, prefill_settings, arguments),
        EngineGroup(Role.DECODE, decode, decode_tensor_parallel, decode_settings, arguments),
    )
    return group_specs(model, groups, machine)


def group_specs(
    model: str, groups: Sequence[EngineGroup], machine: Devices | None = None
) -> tuple[EngineSpec, ...]:
    """Return the specifications of several engines on this machine, in the order of their groups.

    Args:
        machine: devices that the engines share; None for the devices of this machine.

    Raises:
        ConfigError: a count is less than 1, an engine has more workers than there are GPUs, the path of the
            model cannot be read, a connector setting is not valid, a parallel size in the arguments is not
            valid, the arguments have an option that this function sets, such as ``--port``, or vLLM's
            attention fails on this CPU.
    """
    for group in groups:
        for name, count in ((group.name, group.count), (f"{group.name}-tp", group.tensor_parallel)):
            if count < 1:
                raise ConfigError(f"{name} is {count}, it must be at least 1")
    check_path(model)
    for group in groups:
        _check_arguments(group.arguments)
    machine = machine or visible_devices()
    numbered = [(group, number) for group in groups for number in range(group.count)]
    workers = [group.parallel.workers for group, _ in numbered]
    for group, number in numbered:
        _check_gpus(machine, f"{group.name}-{number}", group.parallel)
    if not machine.gpus:
        for group in groups:
            check_attention(group.arguments)
    environments = engine_environments(machine, workers)
    # At once, so that no port is chosen twice.
    every = free_ports(2 * len(numbered))
    ports, control_ports = every[::2], every[1::2]
    settings = _meeting([group for group, _ in numbered], control_ports)
    return tuple(
        EngineSpec(
            name=f"{group.name}-{number}",
            role=group.role,
            model=model,
            port=port,
            tensor_parallel=group.tensor_parallel,
            kv_transfer=kv_transfer_config(group.role, own),
            arguments=(*memory_arguments(machine, workers, group.arguments), *group.arguments),
            environment=environment,
        )
        for (group, number), port, own, environment in zip(
            numbered, ports, settings, environments, strict=True
        )
    )


def _meeting(engines: Sequence[EngineGroup], ports: Sequence[int]) -> list[dict[str, Any]]:
    """Return each engine's connector settings, with which decode engines meet prefill engines at start.

    `ports` are free ones for the control channels.
    """
    settings = [dict(group.settings or {}) for group in engines]
    named = any(own.get(name) is not None for own in settings for name in _ADDRESSES)
    # Each data-parallel replica has a control channel, so one port does not name them all.
    if named or any(group.parallel.data > 1 for group in engines):
        return settings
    pairs = list(zip(engines, ports, strict=True))
    met = [f"127.0.0.1:{port}" for group, port in pairs if group.role is Role.PREFILL]
    for own, (group, port) in zip(settings, pairs, strict=True):
        if group.role is Role.PREFILL:
            own["port"] = port
        elif group.role is Role.DECODE:
            own["peers"] = ["localhost", *met]
    return settings


def split_arguments(option: str, text: str) -> list[str]:
    """Split the value of an option as a shell does. Raise ConfigError if a quotation mark is not closed."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"{option} is {text!r}: {error}; close every quotation mark") from error


def _check_gpus(machine: Devices, name: str, size: Parallel) -> None:
    if machine.gpus and size.workers > len(machine.gpus):
        raise ConfigError(
            f"{name} needs {size.workers} GPUs ({size}), {len(machine.gpus)} can be used here "
            f"({', '.join(machine.gpus)}); lower a parallel size, or start engines on several machines and "
            "use kvferry router"
        )


def _check_arguments(arguments: Sequence[str]) -> None:
    for argument in arguments:
        # vLLM reads --some_flag as --some-flag.
        name = argument.split("=")[0].replace("_", "-")
        if name in _OURS:
            raise ConfigError(f"{argument} cannot be the same for every engine; use {_OURS[name]}")


def flag(option: str, value: object) -> str:
    """Return the argument of vLLM's API server that sets an option of `vllm.LLM`.

    >>> flag("enable_prefix_caching", False)
    '--no-enable-prefix-caching'

    Raises:
        KVFerryError: the value is not a string, a number or a truth value.
    """
    name = option.replace("_", "-")
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no-{name}"
    if not isinstance(value, (str, int)):
        raise KVFerryError(f"engine option {option} is {value!r}, it must be a string, a number or a switch")
    return f"--{name}={value}"

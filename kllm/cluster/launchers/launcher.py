"""The InstanceLauncher port: starts one incarnation of an instance wherever it is to run, and reports its life."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

from kllm.messages import Down, Up
from kllm.transport.link import Link


class LaunchError(RuntimeError):
    """The instance could not even be started; the message is for the operator."""


class Instance(Protocol):
    """One started incarnation. `link` belongs to whoever launched it; `stop` closes it too.

    wait: returns when the instance is gone, with the reason for the operator. Any number of tasks may wait.
    stop: asks the instance to go, ends it by force after grace_s seconds, and returns when it is gone and its
        resources are free. Idempotent, and to be called even for an instance that is gone.
    """

    @property
    def link(self) -> Link[Up, Down]: ...

    async def wait(self) -> str: ...

    async def stop(self, grace_s: float) -> None: ...


class InstanceLauncher(Protocol):
    async def launch(self) -> Instance:
        """Returns as soon as the instance is on its way; Starting and Hello come over its link. Raises LaunchError."""
        ...


class VisitingLauncher(ABC):
    """Base of launchers that start nothing: their instances were started elsewhere and are only visited. One that is
    not there is waited for, for ever, and one that this gateway does not need any more goes on.

    address: where it is, for the operator."""

    address: str

    @abstractmethod
    async def launch(self) -> Instance:
        """As InstanceLauncher's."""

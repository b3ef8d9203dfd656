"""Membership: keeps a gateway's instances those that its configuration names, while it runs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from kllm.cluster.external.launcher import ExternalLauncher
from kllm.cluster.fleet_config import Entry, FleetConfig, FleetConfigError, RemoteInstanceEntry, name_of
from kllm.cluster.gateway import LEAVE_TIMEOUT_S, Gateway
from kllm.cluster.launchers.launcher import InstanceLauncher
from kllm.cluster.launchers.remote import RemoteLauncher
from kllm.cluster.slot import Slot
from kllm.messages import Role
from kllm.transport.fleet_key import FleetKey

logger = logging.getLogger(__name__)


def make_launcher(entry: Entry, key: FleetKey | None) -> InstanceLauncher:
    """Raises AddressError or FleetConfigError."""
    if isinstance(entry, RemoteInstanceEntry):
        return RemoteLauncher(entry.address, key)
    try:
        return ExternalLauncher(entry)
    except ValueError as error:
        raise FleetConfigError(f"the external engine {entry.url}: {error}") from error


class Membership:
    """gateway: made with the launchers of the entries, in their order."""

    def __init__(self, gateway: Gateway, config: FleetConfig) -> None:
        self._gateway = gateway
        self._members = {
            name_of(entry): (entry, slot) for entry, slot in zip(config.entries, gateway.slots, strict=True)
        }
        self._changing = asyncio.Lock()
        for entry, slot in self._members.values():
            _give_role(entry, slot)

    async def change(self, entries: Sequence[Entry], key: FleetKey | None, timeout: float = LEAVE_TIMEOUT_S) -> None:
        """From now on the instances are these: new ones join, those that are missing finish what they have and leave,
        at most `timeout` seconds later. One whose entry has changed leaves and joins, unless only its role did. `key`
        holds for those that stay, too, from the next connection on: the one that there is has proven itself.
        Raises FleetConfigError, before anything has changed, or ValueError where there is no room."""
        async with self._changing:
            wanted = {name_of(entry): entry for entry in entries}
            launchers = {name: make_launcher(entry, key) for name, entry in wanted.items()}
            leaving: list[Slot] = []
            for name, (entry, slot) in list(self._members.items()):
                if not _same_place(entry, wanted.get(name)):
                    leaving.append(slot)
                    del self._members[name]
            work = [self._leave(slot, timeout) for slot in leaving]
            try:
                changed = [(entry, self._keep_or_join(name, entry, launchers[name])) for name, entry in wanted.items()]
            except ValueError:  # no room for all: those that leave make some
                await asyncio.gather(*work)
                raise
            work += [
                self._change_role(entry.role, slot) for entry, slot in changed if isinstance(entry, RemoteInstanceEntry)
            ]
            await asyncio.gather(*work)

    def _keep_or_join(self, name: str, entry: Entry, launcher: InstanceLauncher) -> Slot:
        known = self._members.get(name)
        if known is None:
            logger.info("%s joins", name)
            slot = self._gateway.add_instance(launcher)
        else:
            slot = known[1]
            slot.launch_with(launcher)
        self._members[name] = (entry, slot)
        _give_role(entry, slot)
        return slot

    async def _change_role(self, role: Role | None, slot: Slot) -> None:
        if role is not None and slot.ready and slot.role != role:
            await self._gateway.set_role(slot.index, role)

    async def _leave(self, slot: Slot, timeout: float) -> None:
        logger.info("%s leaves", slot.address)
        await self._gateway.remove_instance(slot.index, timeout)


def _same_place(entry: Entry, wanted: Entry | None) -> bool:
    """It can stay what it is; its role may change."""
    if isinstance(entry, RemoteInstanceEntry):
        return isinstance(wanted, RemoteInstanceEntry)
    return entry == wanted


def _give_role(entry: Entry, slot: Slot) -> None:
    if isinstance(entry, RemoteInstanceEntry) and entry.role is not None:
        slot.wants(entry.role)

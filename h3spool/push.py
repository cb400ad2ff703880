"""The sending end of a push: claim, send, have it admitted, and let go only of what was acknowledged.

A job is bound to the first peer that is told its name: the peer's spool uuid is in state.json, fsynced, before `admit`
hears of it, and from then on the job goes to that spool only. push counts no attempts; only the peer's 65 fails a job.
"""

from __future__ import annotations

import itertools
import os
import secrets
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

from h3spool import admit, receipt
from h3spool.errors import BY_EXIT_CODE, BadData, H3SpoolError, IOFailed, NotFound, NotUsable, TryLater
from h3spool.job import Job, Outcome
from h3spool.link import LocalLink, LocalRun, SshLink, SshRun
from h3spool.spool import FSYNC_THREADS, Slot, Spool
from h3spool.steps import elsewhere

MAX_JOBS, MAX_BYTES = 32, 512 << 20


def push(spool: Spool, link: LocalLink | SshLink, names: Iterable[str] = ()) -> Iterator[Outcome]:
    """Hand verified jobs over to the peer, in runs of at most 32 jobs or 512 MiB.

    Raises:
        NotUsable: this is a decoder's spool.
        TryLater, Unavailable, NotPermitted, IOFailed: the peer cannot be reached or used; all jobs were put back.
    """
    if spool.role != "sampler":
        raise NotUsable(f"{spool.root}: is a decoder's spool; push belongs to a sampler's")
    spool.empty_slots("push")
    asked = list(names)
    waiting = asked or [name for name in spool.names("verified") if _may_go(spool.job("verified", name), link.uuid)]
    if not waiting:
        return
    slot = spool.take_slot("push")
    runs: deque[_Run] = deque()
    try:
        for parity in itertools.cycle((0, 1)):
            if waiting:
                jobs, waiting, missed = _claim(slot, waiting)
                yield from (elsewhere(spool, name, "verified") for name in missed if asked)
                if jobs:
                    runs.append(_Run(slot, link, jobs, parity))
                    runs[-1].begin()
            if not runs:
                return
            if len(runs) == 2 or not waiting:  # one run is sent while the one before is admitted
                outcomes = runs.popleft().finish()
                yield from (outcome for outcome in outcomes if asked or not isinstance(outcome.error, _BoundElsewhere))
    finally:
        for run in runs:
            run.end({})
        slot.release()


def greet(spool: Spool, link: LocalLink | SshLink) -> dict:
    """Ask the peer's spool who it is, and send nothing.

    Returns:
        `node`, `free_bytes`, `waiting` (jobs) and more.

    Raises:
        NotUsable, TryLater, Unavailable, NotPermitted, IOFailed: a push would fail for this reason.
    """
    slot = spool.take_slot("push")
    transfer = None
    try:
        transfer = link.begin(_run_name(slot, 0), [])
        return transfer.greeting()
    finally:
        if transfer is not None:
            transfer.end()
        slot.release()


def _run_name(slot: Slot, parity: int) -> str:
    """The receiver clears older runs of the same sender and number: two that overlap need two numbers."""
    return f"push-{slot.spool.uuid}-{2 * slot.number + parity}-{secrets.token_hex(8)}"


class _BoundElsewhere(TryLater):
    """The job goes to another spool only; nobody is told unless he asked for this job."""


def _may_go(job: Job, uuid: str | None) -> bool:
    """Whether a job may be told to the spool with this uuid (None: not known yet)."""
    return uuid is None or job.state().get("peer", uuid) == uuid


def _claim(slot: Slot, names: list[str]) -> tuple[list[Job], list[str], list[str]]:
    """Claim one run's worth: the jobs, the names left for the next run, and the names that were not there."""
    jobs, missed, size = [], [], 0
    for index, name in enumerate(names):
        if jobs and (len(jobs) == MAX_JOBS or size >= MAX_BYTES):
            return jobs, names[index:], missed
        job = slot.claim(name)
        if job is None:
            missed.append(name)
            continue
        jobs.append(job)
        size += job.latent.stat().st_size if job.latent.exists() else 0
    return jobs, [], missed


class _Run:
    """One push run: what it holds, and what of it is settled."""

    def __init__(self, slot: Slot, link: LocalLink | SshLink, jobs: list[Job], parity: int):
        self.slot, self.link, self.spool = slot, link, slot.spool
        self.held = {job.name: job for job in jobs}
        self.name = _run_name(slot, parity)
        self.start = receipt.now()
        self._transfer: LocalRun | SshRun | None = None
        self._manifests: dict[str, dict] = {}
        self._outcomes: list[Outcome] = []

    def begin(self) -> None:
        """Prepare the jobs and start to send them."""
        self._prepare()
        if self.held:
            self._transfer = self.link.begin(self.name, list(self.held.values()))

    def finish(self) -> list[Outcome]:
        """Have the jobs admitted. Whatever happens, each is settled or put back."""
        reasons: dict[str, BaseException | None] = {}
        try:
            if self.held:
                self._outcomes += self._hand_over(self._transfer)
            reasons = {outcome.job: outcome.error for outcome in self._outcomes}
            return self._outcomes
        except BaseException as error:
            reasons = dict.fromkeys(self.held, error)
            raise
        finally:
            self.end(reasons)

    def end(self, reasons: dict[str, BaseException | None]) -> None:
        """End the children, then put back what is not settled."""
        if self._transfer is not None:
            self._transfer.end()
        for job in list(self.held.values()):
            if job.path.exists():  # a death of the disk between rename and fsync leaves it in done/
                self._put_back(job, reasons.get(job.name))

    def _put_back(self, job: Job, reason: BaseException | None) -> None:
        try:
            account = job.receipt()
            receipt.close(account, "push", receipt.PUT_BACK, **({"error": str(reason)} if reason else {}))
            job.write_receipt(account)
        except H3SpoolError:
            pass  # a full disk must not keep the job in the slot
        self.slot.put_back(self.held.pop(job.name))

    def _hand_over(self, transfer: LocalRun | SshRun) -> list[Outcome]:
        greeting = transfer.greeting()
        outcomes = self._leave_others(greeting["uuid"])
        self._require_room(greeting)
        jobs, failure = list(self.held.values()), None
        with ThreadPoolExecutor(FSYNC_THREADS) as pool:  # while rsync sends
            list(pool.map(lambda job: _bind(job, greeting["uuid"]), jobs))
        try:
            transfer.sent()
        except H3SpoolError as error:
            failure = error  # what arrived all the same is asked for
        answers = transfer.ask([self._manifests[job.name] for job in jobs]) if jobs else []
        facts = {"peer_uuid": greeting["uuid"], "peer_node": greeting["node"]}
        return outcomes + self._settle(jobs, {answer.get("job"): answer for answer in answers}, failure, facts)

    def _prepare(self) -> None:
        """Open the push event in each receipt (the receiver closes it), then take the manifests."""
        for job in list(self.held.values()):
            account = job.receipt()
            opened = receipt.event("push", self.spool.node, self.start, receipt.OPEN, peer=str(self.link.peer))
            before = account["events"][-1] if account["events"] else {}
            if before.get("step") == "push" and before["outcome"] in (receipt.OPEN, receipt.PUT_BACK):
                account["events"].pop()  # one event a push, however long the peer is away
                opened["attempt"] = before.get("attempt", 1) + 1
            account["events"].append(opened)
            job.write_receipt(account)
            try:
                self._manifests[job.name] = admit.manifest(job)
            except (BadData, NotFound) as error:
                self._outcomes.append(self._fail(job, BadData(str(error))))

    def _leave_others(self, uuid: str) -> list[Outcome]:
        """Put back what is bound to another spool; it is not named to this one."""
        outcomes = []
        for name, job in list(self.held.items()):
            if not _may_go(job, uuid):
                why = (
                    f"job {name} is bound to the spool {job.state()['peer']}, which was told of it first; "
                    f"{self.link.peer} is {uuid}. Push it there, or `h3spool requeue --any-peer {name}` unbinds it"
                )
                outcomes.append(Outcome(name, "verified", _BoundElsewhere(why)))
                account = job.receipt()
                account["events"].pop()
                job.write_receipt(account)
                self.slot.put_back(self.held.pop(name))
        return outcomes

    def _require_room(self, greeting: dict) -> None:
        need = sum(job.latent.stat().st_size for job in self.held.values() if job.latent.exists())
        if greeting["free_bytes"] < need + greeting["min_free_bytes"]:
            raise TryLater(
                f"{self.link.peer}: is full, {greeting['free_bytes'] >> 20} MiB free with {greeting['waiting']} jobs "
                "waiting; jobs stay here until there is room"
            )

    def _settle(
        self, jobs: list[Job], answers: dict[str, dict], failure: H3SpoolError | None, facts: dict
    ) -> list[Outcome]:
        outcomes, done = [], []
        for job in jobs:
            answer = answers.get(job.name)
            if answer and "state" in answer and answer.get("sha256") == job.expected_digest():
                done.append(job)
                outcomes.append(Outcome(job.name, "done"))
            elif answer and answer.get("exit") == BadData.exit_code:
                outcomes.append(self._fail(job, BadData(f"{self.link.peer} refused it: {answer.get('error')}")))
            elif answer and not failure and (error := _damaged(job)):
                outcomes.append(self._fail(job, error))
            else:
                outcomes.append(Outcome(job.name, "verified", failure or self._why_not(answer)))
        facts["run_s"], facts["run_jobs"] = receipt.seconds_between(self.start, receipt.now()), len(jobs)
        for job in done:
            account = job.receipt()
            receipt.close(account, "push", receipt.OK, bytes=os.path.getsize(job.latent), **facts)
            job.write_receipt(account)
        if done:
            self.spool.publish_all(done, "done")
        for job in done:
            del self.held[job.name]
        return outcomes

    def _why_not(self, answer: dict | None) -> H3SpoolError:
        if answer is None:
            return TryLater(f"{self.link.peer}: the connection broke before it acknowledged")
        if "error" not in answer:
            return IOFailed(f"{self.link.peer}: acknowledged something else than was sent: {answer}")
        return BY_EXIT_CODE.get(answer.get("exit"), IOFailed)(f"{self.link.peer}: {answer['error']}")

    def _fail(self, job: Job, error: BadData) -> Outcome:
        account = job.receipt()
        receipt.close(account, "push", receipt.FAILED, error=str(error))
        job.write_receipt(account)
        self.spool.publish(self.held.pop(job.name), "failed")
        return Outcome(job.name, "failed", error)


def _bind(job: Job, uuid: str) -> None:
    if job.state().get("peer") != uuid:
        job.set_state(durable=True, peer=uuid)


def _damaged(job: Job) -> BadData | None:
    """Whether the copy on this node is the damaged one."""
    try:
        job.read_latent()
    except BadData as error:
        return error
    return None

"""The nodes that are up, and their seats: which could take a job, which have jobs, which get no more.

Pure: independent of the queue, swaps and effects. One node's seats are a `NodeState`. Nodes that can run the
same jobs are a `NodeGroup`, so that no event takes time in proportion to the nodes.
"""

from collections.abc import Callable, Collection
from random import Random

from fairlead.base.errors import ContextLengthExceeded
from fairlead.nodes.limits import NodeLimits
from fairlead.router.dispatch.fullness import Pause
from fairlead.router.dispatch.held_sequences import HeldSequences
from fairlead.router.dispatch.job_spec import JobSpec
from fairlead.router.dispatch.node_groups import KINDS, WIDE_KINDS, JobKind, NodeGroup
from fairlead.router.dispatch.node_state import NodeState, Score
from fairlead.router.dispatch.prefixes import RecentPrefixes, shares
from fairlead.router.dispatch.ticket import Run, RunState, Ticket

# Large enough to return a conversation to its node, too small to collect all jobs there.
CACHE_BONUS = 0.2
# Of so many nodes that have had a prompt's beginning, each is compared; of more, the first that is found in
# the order of their scores.
COMPARED_HOLDERS = 16


class NodePool(dict[str, NodeState]):
    """The `NodeState` of each node that is up, by the node's id.

    Only this class writes a ticket's `node` and `runs`. A node that comes up again gets a new state, and
    jobs of the old one release seats that are not counted any more. `held`: the nodes with free seats that
    are kept for jobs that need more of them.
    """

    def __init__(self, random: Random) -> None:
        super().__init__()
        self._random = random
        self._closed: set[str] = set()
        self._expected: dict[str, NodeState] = {}  # not up yet, with seats of jobs that were restored
        self._grants = 0
        self._kinds: dict[tuple[str, bool, bool, bool, int], JobKind] = {}
        self._with_number: list[list[JobKind]] = [[] for _ in range(KINDS)]
        self._wide_kinds = 0  # how many kinds take several seats
        self._last_job: JobSpec | None = None
        self._last_kind: JobKind
        self._groups: dict[tuple[frozenset[str], frozenset[str], bool, bool], NodeGroup] = {}
        self._group_of: dict[NodeState, NodeGroup] = {}
        self._prefixes = RecentPrefixes()
        # Nodes whose groups do not know their present state yet. Dictionaries, so that ties are broken in the
        # same way in each run.
        self._changed: dict[NodeState, None] = {}
        self._with_free_seat: dict[NodeGroup, None] = {}
        self._leaving: dict[NodeState, None] = {}
        self._pauses: dict[NodeState, None] = {}  # the nodes with models that are full
        self.held: list[NodeState] = []
        self._freed = 0
        self._fresh: dict[NodeState, None] = {}  # the nodes with fresh seats
        self._unreported: dict[NodeState, None] = {}

    # Nodes -------------------------------------------------------------------------------------------

    def add(self, node_id: str, models: frozenset[str], limits: NodeLimits) -> NodeState:
        """Add a node that is up; return its new state, which is leaving if the node is closed."""
        node = self._expected.pop(node_id, None)
        self.remove(node_id)
        self[node_id] = node = node or NodeState(node_id, models, limits)
        node.changed = self._changed
        if node_id in self._closed:
            self.leave(node)
        self._set(node, models, limits)
        return node

    def change(self, node_id: str, models: frozenset[str], limits: NodeLimits) -> bool:
        """Replace a node's models and limits. Return whether it is up."""
        if (node := self.get(node_id)) is None:
            return False
        if node.is_closed and limits.seats:  # its server may have started again
            node.full.clear()
            self.update_full(node)
        self._set(node, models, limits)
        return True

    def remove(self, node_id: str) -> NodeState | None:
        """Remove a node, and return its state; None if it was not up."""
        self._expected.pop(node_id, None)
        node = self.pop(node_id, None)
        if node is not None:
            self._ungroup(node)
            self._changed.pop(node, None)
            self._leaving.pop(node, None)
            self._prefixes.remove(node)
            self._pauses.pop(node, None)
            self._fresh.pop(node, None)
            node.changed = {}
        return node

    def close(self, node_id: str) -> bool:
        """Give a node no more jobs, not even after it restarts. Return whether it is up."""
        self._closed.add(node_id)
        node = self.get(node_id)
        if node is not None:
            self.leave(node)
        return node is not None

    def leave(self, node: NodeState) -> None:
        """Give a node no more jobs in this run."""
        node.leaving = True
        self._leaving[node] = None

    def reopen(self, node_id: str) -> None:
        """Allow a node of this name to get jobs the next time it comes up."""
        self._closed.discard(node_id)

    def is_current(self, node: NodeState) -> bool:
        """Return whether the node is up, and has no newer state."""
        return self.get(node.id) is node

    def idle_and_leaving(self) -> list[NodeState]:
        """Return the leaving nodes that have no jobs."""
        return [node for node in self._leaving if not node.jobs] if self._leaving else []

    # Candidates --------------------------------------------------------------------------------------

    def kind(self, job: JobSpec) -> JobKind:
        """Return the kind of a job, which determines the nodes that can run it."""
        if job is self._last_job:  # each event asks several times
            return self._last_kind
        seats = 1 if job.sequences == 1 else job.seats  # mostly 1, and asked for each job
        key = (job.model, job.body_bytes is None, job.must_be_relayed, job.needs_own_node, seats)
        kind = self._kinds.get(key)
        if kind is None:
            kind = self._kinds[key] = self._new_kind(job)
        self._last_job, self._last_kind = job, kind
        return kind

    def _new_kind(self, job: JobSpec) -> JobKind:
        if job.seats == 1:
            number = (len(self._kinds) - self._wide_kinds) % (KINDS - WIDE_KINDS)
        else:
            number = KINDS - WIDE_KINDS + self._wide_kinds % WIDE_KINDS
            self._wide_kinds += 1
        kind = JobKind(job, number)
        sharing = self._with_number[number]
        sharing.append(kind)
        for each in sharing if len(sharing) > 1 else ():
            each.shares_number = True
        for group in self._groups.values():
            _match(kind, group)
        return kind

    def kinds_with_free_seat(self) -> int:
        """Return a bit for the number of each kind of job that a node with a free seat can run.

        The node may have too few of them for a job that takes several.
        """
        if self._changed:
            self._update()
        kinds = 0
        for group in self._with_free_seat:
            kinds |= group.kinds
        return kinds

    def kinds_of(self, model: str) -> int:
        """Return a bit for each kind of job for a model that shares its number with no other kind."""
        kinds = 0
        for kind in self._kinds.values():
            if kind.job.model == model and not kind.shares_number:
                kinds |= 1 << kind.number
        return kinds

    def with_several_seats(self) -> NodeState | None:
        """Return the only node, if it has several free seats for any job that fits its cache.

        Does not apply while limited cache memory is empty or overfull: an empty cache takes a first job of
        any size.
        """
        if len(self) != 1:
            return None
        node = next(iter(self.values()))
        if node.free < 2 or node.limits.needs_relay or node.full or node.fresh:
            return None
        left = node.tokens_left
        return node if left is None or (node.busy and left >= 0) else None

    def has_seat_for(self, job: JobSpec) -> bool:
        """Return whether a job that arrived now would find a seat."""
        if self._changed:
            self._update()
        kind = self.kind(job)
        for group in kind.open:
            if group.free and (kind.seats == 1 or group.has_seats(kind.seats)):
                return not (self._pauses or self._fresh) or any(
                    not self._refuses(node, job) and node.free >= node.seats_for(kind.seats)
                    for each in kind.open
                    for node in each.free
                )
        return False

    def has_seats_with(self, model: str, seats: int) -> bool:
        """Return whether a node with the model has so many free seats, or all of its own."""
        if self._changed:
            self._update()
        return any(
            model in group.models and model not in group.closed and group.has_seats(seats)
            for group in self._with_free_seat
        )

    def local(self) -> list[NodeState]:
        """Return the nodes with models that swaps load and evict."""
        return [node for group in self._groups.values() if group.evictable for node in group.nodes]

    def local_with(self, model: str) -> NodeState | None:
        """Return the node where a swap has loaded the model; None if it is not loaded here."""
        return next((node for node in self.local() if model in node.models), None)

    def with_model(self, model: str) -> list[NodeState]:
        """Return the nodes that have the model and are not closed."""
        groups = (group for group in self._groups.values() if model in group.models)
        return [node for group in groups for node in group.nodes if not node.is_closed]

    def accepting(self, job: JobSpec) -> list[NodeState]:
        """Return the nodes that could run such a job at all and are not closed."""
        return [node for group in self.kind(job).groups for node in group.nodes if not node.is_closed]

    def avoided(self, ticket: Ticket) -> Collection[NodeState]:
        """Return nodes that may not run the job: that refused it, or have no seat for its tenant now.

        The one where it failed last is among them, unless there is no other.
        """
        failed, unsuited = ticket.failed_at, ticket.unsuited
        if failed is None and not unsuited and not (self._pauses or self._fresh):
            return ()
        avoided = set(unsuited)
        if self._pauses or self._fresh:
            refusing = (*self._pauses, *self._fresh)
            avoided.update(node for node in refusing if self._refuses(node, ticket.job))
        if failed is not None and any(
            node is not failed and node not in unsuited for node in self.accepting(ticket.job)
        ):
            avoided.add(failed)
        return avoided

    def is_unsuited_everywhere(self, ticket: Ticket) -> bool:
        """Return whether all nodes that could run the job have refused it because of their set-up."""
        return all(node in ticket.unsuited for node in self.accepting(ticket.job))

    def fits(self, ticket: Ticket) -> bool | None:
        """Return whether the job fits now: None without free seats, False without cache memory.

        The next sequence of a job that runs fits its node only.
        """
        if (own := ticket.node) is not None:
            has_seat = self.is_current(own) and own.room > 0
            return own.has_cache_for(_tokens_of(ticket, own)) if has_seat else None
        if self._changed:
            self._update()
        kind = self.kind(ticket.job)
        seats, fits, avoided = kind.seats, None, self.avoided(ticket)
        for group in kind.open:
            for node in group.free:
                if node not in avoided and (seats == 1 or node.free >= node.seats_for(seats)):
                    fits = node.has_cache_for(_tokens_of(ticket, node))
                    if fits:
                        return True
        return fits

    def length_error(self, job: JobSpec) -> ContextLengthExceeded | None:
        """Return an error if the job is too long for all nodes that are up for it; None if none is up."""
        least = job.longest_prompt + 1
        longest = 0
        for group in self.kind(job).groups:
            for node in group.nodes:  # most jobs are short enough for the first
                longest = max(longest, node.limits.max_model_len)
                if least <= longest:
                    return None
        if not longest:
            return None
        this_one = f"this one has {job.longest_prompt}"
        return ContextLengthExceeded.of_prompt(longest, this_one, param="prompt")

    # Seats -------------------------------------------------------------------------------------------

    def has_free(self, ticket: Ticket) -> bool:
        """Return whether a node that may run the job has free seats, however few."""
        avoided = self.avoided(ticket)
        return any(node not in avoided for group in self.kind(ticket.job).open for node in group.free)

    def waits_for_node_of(self, ticket: Ticket, other: Ticket) -> bool:
        """Return whether the job could run on the node of the other one."""
        return other.node is not None and self._group_of.get(other.node) in self.kind(ticket.job).groups

    def hold_back(self, ticket: Ticket) -> None:
        """Keep the free seats of one node for a job that needs more than are free on any.

        It is the node where the fewest are missing. Jobs on all other nodes go on.
        """
        if self._changed:
            self._update()
        kind, avoided = self.kind(ticket.job), self.avoided(ticket)
        free = [node for group in kind.open for node in group.free if node not in avoided]
        if free:
            # By the id, so that the same node is kept after the next event, unless another is nearer.
            held = min(free, key=lambda node: (node.seats_for(kind.seats) - node.free, node.id))
            held.is_held = True
            self.held.append(held)

    def end_holds(self) -> None:
        """Keep no seats for any job."""
        for node in self.held:
            node.is_held = False
        self.held.clear()

    def assign(self, ticket: Ticket) -> NodeState:
        """Give a job that fits the best seats that it can have, at `ticket.node`; return this.

        There it gets one for its first sequence, or, if its sequences do not start one by one, all at once.
        """
        node = ticket.node = self._best(ticket)
        node.jobs += 1
        ticket.is_trial = False
        self.begin(ticket, 0, 1 if ticket.job.sequences == 1 else node.seats_for(ticket.job.seats))
        return node

    def begin(self, ticket: Ticket, index: int, seats: int = 1) -> None:
        """Take seats at the job's node for a sequence of it, or for all."""
        node = ticket.node
        assert node is not None
        is_whole, tokens = not node.limits.by_sequence, _tokens_of(ticket, node)
        run = ticket.runs[index] = Run(ticket, index, is_whole=is_whole, seats=seats, tokens=tokens)
        self._take(run, node)

    def _take(self, run: Run, node: NodeState) -> None:
        node.acquire(run.tokens, run.seats)
        if node.fresh:
            self._use_fresh(node, run)
        node.runs[run] = None
        self._grants += 1
        node.used = run.number = self._grants

    def end(self, run: Run) -> None:
        """Free the seats of a sequence that has ended; its job stays."""
        del run.ticket.runs[run.index]
        if run.state is RunState.RUNNING:
            self._free(run)

    def _free(self, run: Run) -> None:
        node = run.ticket.node
        assert node is not None
        node.release(run.tokens, run.seats)
        del node.runs[run]

    def suspend(self, run: Run) -> None:
        """Free the seat of a sequence that has to pause."""
        assert run.state is RunState.RUNNING
        self._free(run)
        run.state = RunState.SUSPENDED

    def resume(self, run: Run) -> None:
        """Take a seat for a sequence that goes on."""
        assert run.state is RunState.SUSPENDED
        assert run.ticket.node is not None
        run.state, run.is_ripe = RunState.RUNNING, False
        self._take(run, run.ticket.node)

    def suspending(self, model: str) -> list[NodeState]:
        """Return the nodes with the model where sequences can be suspended for other jobs."""
        nodes = [node for group in self._groups.values() if model in group.models for node in group.nodes]
        return [node for node in nodes if node.limits.by_sequence and not (node.leaving or node.draining)]

    def restore(self, ticket: Ticket, node_id: str, held: HeldSequences) -> None:
        """Count the seats that a job holds already, at `ticket.node`, which may come up later."""
        node = self.get(node_id) or self._expected.get(node_id)
        if node is None:
            node = self._expected[node_id] = NodeState(node_id, frozenset(), NodeLimits(0, max_model_len=0))
        ticket.node = node
        node.jobs += 1
        for index in held.running:
            self.begin(ticket, index, held.seats)
        for index in held.suspended:
            self.begin(ticket, index)
            self.suspend(ticket.runs[index])

    def release(self, ticket: Ticket) -> NodeState:
        """Free a job's seats; return its node."""
        node = ticket.node
        assert node is not None
        for run in list(ticket.runs.values()):
            self.end(run)
        ticket.node = None
        node.jobs -= 1
        if not node.jobs and self._expected.get(node.id) is node:
            del self._expected[node.id]
        return node

    def _best(self, ticket: Ticket) -> NodeState:
        """Return the node with the lowest score, less a bonus for a cached prefix; ties at random."""
        if len(self) == 1:
            return next(iter(self.values()))
        if self._changed:
            self._update()
        job, avoided = ticket.job, self.avoided(ticket)
        kind = self.kind(job)
        groups, seats = kind.open, kind.seats
        free = [node for group in groups for node in group.free] if len(self._with_free_seat) == 1 else []
        if len(free) == 1:  # so it is on a busy fleet
            self._prefixes.add(free[0], job.prefixes)
            return free[0]

        def suits(node: NodeState) -> bool:
            has_seats = seats == 1 or node.free >= node.seats_for(seats)
            return has_seats and node not in avoided and node.has_cache_for(_tokens_of(ticket, node))

        all_suit = seats == 1 and not avoided and not any(group.limits_cache for group in groups)
        found = [best for group in groups if group.free and (best := group.best(None if all_suit else suits))]
        least, nodes = found[0] if len(found) == 1 else _lowest(found)
        if job.prefixes:
            least, nodes = self._with_bonus(job, groups, suits, least, nodes)
        node = nodes[0] if len(nodes) == 1 else self._random.choice(nodes)
        # Needed even if only one node is free: what it gets now counts in later choices.
        self._prefixes.add(node, job.prefixes)
        return node

    def _with_bonus(
        self,
        job: JobSpec,
        groups: Collection[NodeGroup],
        suits: Callable[[NodeState], bool],
        least: Score,
        nodes: list[NodeState],
    ) -> tuple[Score, list[NodeState]]:
        """Return the nodes with the lowest score: of these, or that have had a prefix of the prompt."""
        for prefix, share in shares(job.prefixes):
            for node in self._holders(prefix, groups, suits):
                has_failed, is_busy, score = node.score
                with_bonus = has_failed, is_busy, score - CACHE_BONUS * share
                if with_bonus < least:
                    least, nodes = with_bonus, [node]
                elif with_bonus == least and node not in nodes:
                    nodes.append(node)
        return least, nodes

    def _holders(
        self, prefix: int, groups: Collection[NodeGroup], suits: Callable[[NodeState], bool]
    ) -> list[NodeState]:
        """Return the nodes with the prefix that may be best for a job."""
        holders: tuple[NodeState, ...] = self._prefixes.holders(prefix)
        if len(holders) > COMPARED_HOLDERS:
            held = set(holders)
            best = [group.best(lambda node: node in held and suits(node)) for group in groups]
            return [node for each in best if each for node in each[1]]
        return [node for node in holders if node.free > 0 and self._group_of[node] in groups and suits(node)]

    # Seats that were left lately ---------------------------------------------------------------------

    def leave_fresh(self, node: NodeState, line: str, seats: int) -> None:
        """Mark seats as just left by a tenant."""
        if not node.limits.by_sequence and self.is_current(node):
            for _ in range(seats):
                self._freed += 1
                node.fresh[self._freed] = line
            self._fresh[node] = self._unreported[node] = None
            self._bound_fresh(node)

    def with_fresh_seats(self) -> Collection[NodeState]:
        """Return the nodes with seats that were left less than a quantum ago."""
        return self._fresh

    def take_freed(self) -> list[tuple[NodeState, int]]:
        """Return the nodes with seats that were left since the last call, with the last number of each."""
        if not self._unreported:
            return []
        freed = [(node, next(reversed(node.fresh))) for node in self._unreported if node.fresh]
        self._unreported.clear()
        return freed

    def rested(self, node: NodeState, number: int) -> None:
        """Record that a quantum has passed since the seats up to this number were left."""
        node.fresh = {each: line for each, line in node.fresh.items() if each > number}
        node.kept_from = {}
        self._bound_fresh(node)

    def _use_fresh(self, node: NodeState, run: Run) -> None:
        """Let a job take the seats that its tenant has left, and then those that are idle for longest."""
        job = run.ticket.job
        if job.line not in node.kept_from.get(job.model, ()):
            own = [number for number, line in node.fresh.items() if line == job.line]
            for number in own[-run.seats :]:
                del node.fresh[number]
        self._bound_fresh(node)

    def _bound_fresh(self, node: NodeState) -> None:
        """Let there be no more fresh seats than free ones."""
        while len(node.fresh) > max(0, node.room):
            node.fresh.popitem()
        if not node.fresh:
            self._fresh.pop(node, None)
            node.kept_from = {}

    # Full nodes --------------------------------------------------------------------------------------

    def update_full(self, node: NodeState) -> None:
        """Record that a `FullModel` of a node has changed."""
        node.update_full()
        if node.full and self.is_current(node):
            self._pauses[node] = None
        else:
            self._pauses.pop(node, None)

    def is_full_for(self, job: JobSpec) -> Pause | None:
        """Return a pause of the job if each of its nodes has one for it; None otherwise, or without nodes."""
        found = None
        for node in self.accepting(job):
            full = node.full.get(job.model)
            if full is None or not full.holds_back(job.tenant):
                return None
            found = full.of_all or full.of_tenants.get(job.tenant)
        return found

    def _refuses(self, node: NodeState, job: JobSpec) -> bool:
        full = node.full.get(job.model)
        if full is not None and full.refuses(job.tenant):
            return True
        return job.line in node.kept_from.get(job.model, ())

    # Groups ------------------------------------------------------------------------------------------

    def _set(self, node: NodeState, models: frozenset[str], limits: NodeLimits) -> None:
        """Set a node's models and limits, and put it into the group of those that can run the same jobs."""
        node.models, node.limits = models, limits
        self._bound_fresh(node)
        has_cache_limit = limits.cache_tokens is not None
        key = models, node.closed_models & models, limits.evictable, limits.needs_relay
        group = self._groups.get(key)
        if group is not None:
            group.limits_cache |= has_cache_limit
            if self._group_of.get(node) is group:
                return
        self._ungroup(node)
        is_new = group is None
        if group is None:
            group = self._groups[key] = NodeGroup(models, key[1], evictable=limits.evictable)
            group.limits_cache = has_cache_limit
        group.nodes[node] = None
        self._group_of[node] = group
        for kind in self._kinds.values() if is_new else ():
            _match(kind, group)

    def _ungroup(self, node: NodeState) -> None:
        group = self._group_of.pop(node, None)
        if group is None:
            return
        group.remove(node)
        if not group.free:
            self._with_free_seat.pop(group, None)
        if not group.nodes:
            self._groups = {key: other for key, other in self._groups.items() if other is not group}
            for kind in self._kinds.values():
                kind.groups.pop(group, None)
                kind.open.pop(group, None)

    def _update(self) -> None:
        """Record the present state of the nodes that have changed."""
        for node in self._changed:
            group = self._group_of[node]
            if group.closed != node.closed_models & node.models:
                self._set(node, node.models, node.limits)
                group = self._group_of[node]
            group.update(node)
            if group.free:
                self._with_free_seat[group] = None
            else:
                self._with_free_seat.pop(group, None)
        self._changed.clear()


def _match(kind: JobKind, group: NodeGroup) -> None:
    """Record whether the nodes of a group can run jobs of a kind."""
    if group.accepts(kind.job):
        kind.groups[group] = None
        if kind.job.model not in group.closed:
            kind.open[group] = None
            group.kinds |= 1 << kind.number


def _tokens_of(ticket: Ticket, node: NodeState) -> int:
    """Return the cache tokens of what begins at once on a node: one sequence of the job, or all of it."""
    return ticket.tokens // ticket.job.turns if node.limits.by_sequence else ticket.tokens


def _lowest(found: list[tuple[Score, list[NodeState]]]) -> tuple[Score, list[NodeState]]:
    """Return the nodes with the lowest score of several groups."""
    least = min(score for score, _ in found)
    return least, [node for score, nodes in found if score == least for node in nodes]

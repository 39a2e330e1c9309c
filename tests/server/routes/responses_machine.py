"""A state machine that compares `ResponseStore`, or the `new_store` of a subclass, with a plain model."""

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from fairlead.server.responses.store import EVENT_BYTES, RESPONSE_BYTES, ResponseStore, StoredResponse

MACHINE_SETTINGS = settings(
    max_examples=150,
    stateful_step_count=40,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)

TTL_S = 10.0
MAX_BYTES = 4 * RESPONSE_BYTES
sizes = st.sampled_from([1, 100, RESPONSE_BYTES, 3 * RESPONSE_BYTES])
tenants = st.sampled_from(["a", "b", "c"])
owners = st.sampled_from(["", "key-1", "key-2"])


class ResponsesMachine(RuleBasedStateMachine):
    """`model` has the present responses, in the order in which they began.

    Each is a dict with its tenant, owner, size, document and events, and the time of its end, or None.
    """

    new_store = ResponseStore
    responses = Bundle("responses")

    @initialize()
    def create(self):
        self.store = self.new_store(MAX_BYTES, TTL_S)
        self.model = {}
        self.now_s = 0.0
        self.ends = 0  # orders what ended at the same time
        self.removed = []  # the ids that were removed before their ends
        self.expected_removed = []
        self.tenants = []  # in the order in which they got their first response
        self.began = 0

    # Rules -------------------------------------------------------------------------------------------

    @rule(target=responses, tenant=tenants, owner=owners, size=sizes)
    def begin(self, tenant, owner, size):
        name = f"resp_{self.began}"
        self.began += 1
        response = StoredResponse(
            name, owner, tenant, input=b"i" * size, on_removed=lambda: self.removed.append(name)
        )
        self.model[name] = {
            "tenant": tenant,
            "owner": owner,
            "size": RESPONSE_BYTES + size,
            "document": b"",
            "events": [],
            "ended": None,
        }
        if tenant not in self.tenants:
            self.tenants.append(tenant)
        self.evict()
        self.store.begin(response)
        return response

    @rule(target=responses, tenant=tenants, owner=owners, size=sizes)
    def keep(self, tenant, owner, size):
        """Begin a response and end it, because most do."""
        response = self.begin(tenant, owner, 1)
        self.end(response, size)
        return response

    @rule(response=responses, size=sizes)
    def set_document(self, response, size):
        if (known := self.running(response)) is not None:
            known["size"] += size - len(known["document"])
            known["document"] = b"d" * size
            self.evict()
        if not response.has_ended:
            self.store.set_document(response, b"d" * size)

    @rule(response=responses, count=st.integers(0, 3), size=sizes)
    def append(self, response, count, size):
        events = [b"%d" % index * size for index in range(count)]
        if (known := self.running(response)) is not None:
            known["events"] += events
            known["size"] += count * (size + EVENT_BYTES)
            self.evict()
        if not response.has_ended:
            self.store.append(response, events)

    @rule(response=responses, size=sizes)
    def end(self, response, size):
        if (known := self.running(response)) is not None:
            known["ended"] = self.next_end()
            known["size"] += size - len(known["document"])
            known["document"] = b"e" * size
            self.evict()
        if not response.has_ended:
            self.store.end(response, b"e" * size, self.now_s)

    @rule(response=responses)
    def renew(self, response):
        known = self.model.get(response.id)
        if known is not None and known["ended"] is not None:
            known["ended"] = self.next_end()
        if response.has_ended:
            self.store.renew(response, self.now_s)

    @rule(response=responses)
    def remove(self, response):
        if response.id in self.model:
            self.forget(response.id)
        self.store.remove(response)

    @rule(seconds=st.sampled_from([0.5, TTL_S / 2, TTL_S]))
    def wait(self, seconds):
        self.now_s += seconds

    @rule()
    def expire(self):
        self.store.expire(self.now_s)
        self.expire_in_the_model()

    @rule(response=responses, owner=owners)
    def find(self, response, owner):
        found = self.store.find(response.id, owner, self.now_s)
        self.expire_in_the_model()
        known = self.model.get(response.id)
        is_visible = known is not None and known["document"] and known["owner"] == owner
        assert found is (response if is_visible else None)
        if found is not None:
            assert (found.document, found.events) == (known["document"], known["events"])

    # What always holds -------------------------------------------------------------------------------

    @invariant()
    def store_has_what_the_model_has(self):
        if not hasattr(self, "store"):
            return
        assert self.store.size == sum(known["size"] for known in self.model.values()) <= MAX_BYTES
        assert len(self.store) == len(self.model)
        assert self.store.tenants == len({known["tenant"] for known in self.model.values()})
        assert self.removed == self.expected_removed

    # The model ---------------------------------------------------------------------------------------

    def running(self, response):
        known = self.model.get(response.id)
        return known if known is not None and known["ended"] is None else None

    def next_end(self):
        self.ends += 1
        return self.now_s, self.ends

    def forget(self, name):
        if self.model.pop(name)["ended"] is None:
            self.expected_removed.append(name)
        present = {known["tenant"] for known in self.model.values()}
        self.tenants = [tenant for tenant in self.tenants if tenant in present]

    def expire_in_the_model(self):
        for name, known in list(self.model.items()):
            if known["ended"] is not None and known["ended"][0] + TTL_S <= self.now_s:
                self.forget(name)

    def evict(self):
        while sum(known["size"] for known in self.model.values()) > MAX_BYTES:
            sizes = {
                tenant: sum(known["size"] for known in self.model.values() if known["tenant"] == tenant)
                for tenant in self.tenants
            }
            largest = max(self.tenants, key=lambda tenant: sizes[tenant])
            ended = [
                (known["ended"], name)
                for name, known in self.model.items()
                if known["tenant"] == largest and known["ended"] is not None
            ]
            others = [name for name, known in self.model.items() if known["tenant"] == largest]
            self.forget(min(ended)[1] if ended else others[0])

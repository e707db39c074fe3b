"""The table of work items: by hand, and every order of events that Hypothesis finds."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rolltree.scale.cluster.leases import MAX_ATTEMPTS, Leases


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def leases(*item_ids, cost=1):
    clock = Clock()
    table = Leases[str](30.0, clock)
    for item_id in item_ids:
        table.offer(item_id, f"play {item_id}", cost)
    return table, clock


def poll(table, worker="w", life="1", slots=4, have=()):
    drop = table.poll(worker, life, slots, list(have))
    return [lease.item_id for lease in table.take(worker, slots - len(have))], drop


def test_items_are_handed_out_in_order_and_only_once():
    table, _ = leases("a", "b", "c")
    assert poll(table, "w", slots=2) == (["a", "b"], [])
    assert poll(table, "v", slots=2) == (["c"], [])
    assert poll(table, "w", slots=2, have=["a", "b"]) == ([], [])
    assert (table.num_queued, table.num_slots, len(table)) == (0, 4, 3)


def test_a_worker_that_dies_gives_its_items_back_to_the_front():
    table, clock = leases("a", "b", "c", "d")
    assert poll(table, "w", slots=2)[0] == ["a", "b"]
    clock.now = 31.0
    assert table.expire() == []
    assert poll(table, "v", slots=4)[0] == ["a", "b", "c", "d"]


def test_a_worker_that_the_driver_does_not_see_is_lost_sooner():
    table, clock = leases("a")
    poll(table)
    clock.now = 2.0
    table.expire([])
    assert table.num_queued == 0  # it has just polled: the driver may not know it yet
    clock.now = 4.0
    table.expire(["w"])
    assert table.num_queued == 0
    table.expire([])
    assert table.num_queued == 1


def test_a_new_life_of_a_worker_has_nothing_of_the_old_one():
    table, _ = leases("a")
    assert poll(table, life="1")[0] == ["a"]
    found = table.poll("w", "2", 4, [])
    assert found == []
    (lease,) = table.take("w", 4)
    assert (lease.item_id, lease.attempt, lease.content) == ("a", 2, "play a")


def test_what_a_worker_was_given_and_never_got_goes_back():
    table, _ = leases("a", "b")
    assert poll(table, slots=2)[0] == ["a", "b"]
    assert poll(table, slots=2, have=["b"])[0] == ["a"]


def test_the_first_result_counts_and_the_second_is_known():
    table, clock = leases("a")
    poll(table, "w")
    clock.now = 31.0
    table.expire()
    assert poll(table, "v")[0] == ["a"]
    assert table.claim("a") == "play a"  # of the worker that was taken for dead
    assert table.claim("a") is None
    assert table.is_claimed("a")
    table.settle("a", True)
    assert (table.claim("a"), table.is_claimed("a"), len(table)) == (None, False, 0)
    assert poll(table, "v", have=["a"]) == ([], ["a"])


def test_a_result_that_could_not_be_stored_is_played_again():
    table, _ = leases("a")
    poll(table)
    table.claim("a")
    table.settle("a", False)
    assert poll(table)[0] == ["a"]


def test_an_item_that_ends_its_workers_is_given_up():
    table, _ = leases("a")
    for life in range(MAX_ATTEMPTS):
        assert poll(table, life=str(life))[0] == ["a"]
        assert table.expire() == []
    assert poll(table, life="last")[0] == []
    assert table.expire() == ["a"]
    assert table.claim("a") == "play a"


def test_a_group_larger_than_a_worker_is_played_by_one_that_has_nothing_else():
    table, _ = leases("a", "b", cost=8)
    assert poll(table, slots=4)[0] == ["a"]
    assert table.take("w", 3) == []
    assert poll(table, "v", slots=4)[0] == ["b"]


def test_withdrawn_items_are_dropped_at_the_next_poll():
    table, _ = leases("a", "b")
    poll(table, slots=1)
    table.withdraw(["a", "b"])
    assert poll(table, slots=1, have=["a"]) == ([], ["a"])
    assert len(table) == table.num_queued == 0


class Orders(RuleBasedStateMachine):
    """Workers that die, answers that get lost, results that come twice: each item ends once."""

    def __init__(self):
        super().__init__()
        self.clock = Clock()
        self.table = Leases[int](30.0, self.clock)
        self.num_offered, self.done = 0, list[str]()
        self.lives = {"u": 0, "v": 0}
        self.has = {"u": set[str](), "v": set[str]()}

    @rule()
    def offer(self):
        self.table.offer(f"{self.num_offered:04d}", self.num_offered)
        self.num_offered += 1

    @rule(worker=st.sampled_from("uv"), slots=st.integers(0, 3), is_lost=st.booleans())
    def poll(self, worker, slots, is_lost):
        have = self.has[worker]
        dropped = self.table.poll(worker, str(self.lives[worker]), slots, sorted(have))
        have -= set(dropped)
        leased = self.table.take(worker, slots - len(have))
        if not is_lost:
            have |= {lease.item_id for lease in leased}

    @rule(worker=st.sampled_from("uv"))
    def die(self, worker):
        self.lives[worker] += 1
        self.has[worker] = set()

    @rule(worker=st.sampled_from("uv"), is_stored=st.booleans(), data=st.data())
    def finish(self, worker, is_stored, data):
        if not self.has[worker]:
            return
        item_id = data.draw(st.sampled_from(sorted(self.has[worker])))
        if self.table.claim(item_id) is not None:
            assert item_id not in self.done
            self.table.settle(item_id, is_stored)
            if is_stored:
                self.done.append(item_id)
        self.has[worker].discard(item_id)

    @rule(seconds=st.sampled_from([1.0, 40.0]))
    def wait(self, seconds):
        self.clock.now += seconds
        for item_id in self.table.expire():
            assert self.table.claim(item_id) is not None
            self.table.settle(item_id, True)
            self.done.append(item_id)

    @precondition(lambda self: self.num_offered)
    @invariant()
    def nothing_is_lost(self):
        assert len(self.done) + len(self.table) == self.num_offered
        assert len(set(self.done)) == len(self.done)

    def teardown(self):
        """Everything that was offered is done once one worker is left that works."""
        self.clock.now += 40.0
        self.wait(0.0)
        for _ in range(3 * self.num_offered):
            self.table.poll("last", "1", 2, [])
            for lease in self.table.take("last", 2):
                self.table.claim(lease.item_id)
                self.table.settle(lease.item_id, True)
                self.done.append(lease.item_id)
            self.wait(0.0)
        assert sorted(self.done) == [f"{n:04d}" for n in range(self.num_offered)]


TestOrders = Orders.TestCase
TestOrders.settings = settings(max_examples=60, stateful_step_count=40)

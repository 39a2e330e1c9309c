"""Round robin: one ring of tenants for each class."""

from fairqueue.queue cimport NONE, Class, Line, Queue, int32_t

cdef inline void ring_join(Queue *queue, int32_t tenant, int32_t priority) noexcept:
    # Add a tenant that this round has served to the back, and any other before the first that was served.
    cdef Class *ring = &queue.classes[priority]
    cdef Line *line = &queue.tenants[tenant].lines[priority]
    cdef Line *follower
    cdef bint was_served = line.served == ring.round
    line.next = ring.turn if was_served or ring.first_served == NONE else ring.first_served
    if line.next == NONE:
        line.previous = line.next = tenant
    else:
        follower = &queue.tenants[line.next].lines[priority]
        line.previous = follower.previous
        queue.tenants[line.previous].lines[priority].next = tenant
        follower.previous = tenant
    if ring.turn == NONE or (ring.turn == ring.first_served and not was_served):
        ring.turn = tenant
    if was_served and ring.first_served == NONE:
        ring.first_served = tenant

cdef inline void ring_leave(Queue *queue, int32_t tenant, int32_t priority) noexcept:
    cdef Class *ring = &queue.classes[priority]
    cdef Line *line = &queue.tenants[tenant].lines[priority]
    if line.next == tenant:
        ring.turn = ring.first_served = NONE
        return
    queue.tenants[line.previous].lines[priority].next = line.next
    queue.tenants[line.next].lines[priority].previous = line.previous
    if ring.first_served == tenant:
        ring.first_served = NONE if line.next == ring.turn else line.next
    if ring.turn == tenant:
        ring.turn = line.next

cdef inline void ring_turn(Queue *queue, int32_t tenant, int32_t priority) noexcept:
    # Record a tenant's turn; it may have left the ring with its last entry. A second turn in a round means
    # that no other tenant is left to serve in it: the round is over, and this is the first turn of the next.
    cdef Class *ring = &queue.classes[priority]
    cdef Line *line = &queue.tenants[tenant].lines[priority]
    if line.served == ring.round:
        ring.round += 1
        ring.first_served = NONE
    line.served = ring.round
    if line.chain.length > 0:
        ring_leave(queue, tenant, priority)
        ring_join(queue, tenant, priority)

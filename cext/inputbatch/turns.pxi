# Round robin, and sorting in the order of admission.

cdef struct Turn:
    int64_t last_scheduled
    int64_t place           # in the order of admission, beginning with the sequence whose turn is next
    int32_t slot


cdef inline bint precedes(Turn *one, Turn *other) noexcept:
    if one.last_scheduled != other.last_scheduled:
        return one.last_scheduled < other.last_scheduled
    return one.place < other.place


cdef void sort(int64_t *numbers, int32_t count) noexcept:
    # Shellsort; usually there is little to do, because rows are assigned in the order of admission.
    cdef int32_t gaps[12]
    cdef int32_t gap, i, j, k
    cdef int64_t number
    gaps[:] = [86961, 33936, 13776, 4592, 1968, 861, 336, 112, 48, 21, 7, 1]
    for k in range(12):
        gap = gaps[k]
        for i in range(gap, count):
            number = numbers[i]
            j = i
            while j >= gap and numbers[j - gap] > number:
                numbers[j] = numbers[j - gap]
                j -= gap
            numbers[j] = number


cdef Turn nth_turn(Turn *turns, int32_t count, int32_t nth) noexcept:
    # Hoare's quickselect: return the nth smallest, from 0; all of them differ.
    cdef int32_t low = 0, high = count - 1, i, j
    cdef Turn pivot, turn
    while low < high:
        pivot = turns[low + (high - low) // 2]
        i, j = low, high
        while i <= j:
            while precedes(&turns[i], &pivot):
                i += 1
            while precedes(&pivot, &turns[j]):
                j -= 1
            if i <= j:
                turn = turns[i]
                turns[i] = turns[j]
                turns[j] = turn
                i += 1
                j -= 1
        if nth <= j:
            high = j
        elif nth >= i:
            low = i
        else:
            break
    return turns[nth]

"""SipHash-2-4 with a 128-bit result (Aumasson, Bernstein: SipHash, a fast short-input PRF)."""

from libc.stdint cimport uint64_t
from libc.string cimport memcpy

cdef struct Hash:
    uint64_t low
    uint64_t high  # both 0: none

cdef struct Sip:
    uint64_t v0
    uint64_t v1
    uint64_t v2
    uint64_t v3

cdef inline bint is_none(Hash *hash) noexcept:
    return hash.low == 0 and hash.high == 0

cdef inline bint is_same(Hash *one, Hash *other) noexcept:
    return one.low == other.low and one.high == other.high

cdef inline uint64_t rotated(uint64_t word, int bits) noexcept:
    return word << bits | word >> (64 - bits)

cdef inline void sip_rounds(Sip *sip, int count) noexcept:
    cdef int i
    for i in range(count):
        sip.v0 += sip.v1
        sip.v1 = rotated(sip.v1, 13) ^ sip.v0
        sip.v0 = rotated(sip.v0, 32)
        sip.v2 += sip.v3
        sip.v3 = rotated(sip.v3, 16) ^ sip.v2
        sip.v0 += sip.v3
        sip.v3 = rotated(sip.v3, 21) ^ sip.v0
        sip.v2 += sip.v1
        sip.v1 = rotated(sip.v1, 17) ^ sip.v2
        sip.v2 = rotated(sip.v2, 32)

cdef inline void sip_word(Sip *sip, uint64_t word) noexcept:
    sip.v3 ^= word
    sip_rounds(sip, 2)
    sip.v0 ^= word

cdef inline Hash siphash(Hash *key, Hash *parent, const char *message, size_t length) noexcept:
    # Hash the 16 bytes of `parent`, unless it is NULL, and then the message.
    cdef Sip sip
    cdef Hash result
    cdef uint64_t word
    cdef size_t all_bytes = length
    sip.v0 = key.low ^ 0x736F6D6570736575ULL
    sip.v1 = key.high ^ 0x646F72616E646F6DULL ^ 0xEE
    sip.v2 = key.low ^ 0x6C7967656E657261ULL
    sip.v3 = key.high ^ 0x7465646279746573ULL
    if parent != NULL:
        all_bytes += sizeof(Hash)
        sip_word(&sip, parent.low)
        sip_word(&sip, parent.high)
    while length >= 8:
        memcpy(&word, message, 8)
        sip_word(&sip, word)
        message += 8
        length -= 8
    word = 0
    memcpy(&word, message, length)
    sip_word(&sip, word | <uint64_t>all_bytes << 56)
    sip.v2 ^= 0xEE
    sip_rounds(&sip, 4)
    result.low = sip.v0 ^ sip.v1 ^ sip.v2 ^ sip.v3
    sip.v1 ^= 0xDD
    sip_rounds(&sip, 4)
    result.high = sip.v0 ^ sip.v1 ^ sip.v2 ^ sip.v3
    return result

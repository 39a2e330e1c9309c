# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
# cython: annotation_typing=False, auto_pickle=False, autotestdict=False
"""The CPU kernel of a dense decoder: a whole step, from token ids to logits, in one call.

Owns the packed weights and the pages of the KV cache; `cpustep/cpustep.h` has their layouts. It does not use
checkpoints, sequences, samplers or torch. Every argument that becomes an address is checked: a wrong one
raises ValueError before anything has changed. A step runs without the GIL; a model runs one step at a time.
"""

from libc.stdint cimport int32_t, int64_t, uint16_t
from libc.stdlib cimport calloc, malloc
from libc.string cimport memcpy

import math


cdef extern from "cpustep/cpustep.h" nogil:
    enum:
        BLOCK
        HEAD_AT_MOST
        GROUPS_AT_MOST
        ROPES_AT_MOST
        THREADS_AT_MOST
        FLOAT32
        BFLOAT16
        PLAIN
        GATE_HALF
        UP_HALF
        ATTENTION_NORM
        QUERY_NORM
        KEY_NORM
        POST_ATTENTION_NORM
        MLP_NORM
        POST_MLP_NORM
        QKV_BIAS
        OUTPUT_BIAS
        GATE_UP_BIAS
        DOWN_BIAS
        QKV
        OUTPUT
        GATE_UP
        DOWN

    int padded(int size)

    ctypedef struct Kernels:
        const char *name

    ctypedef struct Shape:
        int dtype
        int vocabulary
        int hidden
        int inner
        int layers
        int heads
        int kv_heads
        int head_dim
        int tied
        int qkv_bias
        int output_bias
        int mlp_bias
        int query_key_norm
        int post_norms
        int gelu
        int int8
        float epsilon
        float embedding_scale
        float attention_scale
        float attention_cap
        float logit_cap
        int groups
        int ropes
        int windows[8]
        int rotated[8]
        float rope_scale[8]
        int threads
        int tokens_at_most

    ctypedef struct Layer:
        void *matrices[4]
        float *scales[4]
        float *vectors[10]
        int group
        int rope

    ctypedef struct Model:
        Shape shape
        const Kernels *kernels
        Layer *layers
        void *embedding
        void *head
        float *embedding_scales
        float *head_scales
        float *final_norm
        float *frequencies[8]
        size_t element
        size_t page_bytes
        char *cache_memory
        int blocks[8]
        size_t weights_bytes
        size_t cache_bytes
        size_t work_bytes

    ctypedef struct Step:
        int tokens
        int rows
        int samples
        const int32_t *input_ids
        const int32_t *positions
        const int32_t *slot_mapping[8]
        const int32_t *query_starts
        const int32_t *sequence_lengths
        const int32_t *slots
        const int32_t *sample_rows
        const int32_t *tables[8]
        int table_rows[8]
        int table_width[8]
        float *logits
        long logits_stride

    ctypedef struct Choice:
        int rows
        int vocabulary
        const float *logits
        long stride
        const float *temperatures
        float greedy_below
        const int32_t *top_k
        const double *top_p
        const float *least
        const double *numbers
        int64_t *tokens
        float *highest

    const Kernels *find_kernels(int dtype, const char *name)
    const Kernels *list_kernels(int dtype, int index)
    int lay_out_weights(Model *)
    int lay_out_work(Model *)
    int lay_out_cache(Model *, const int *blocks)
    void release_blocks(Model *, int group, int first, int count)
    void free_model(Model *)
    int64_t pack_matrix(const Model *, void *, float *, const void *, int rows, int inputs, int first_row, int half)
    int64_t pack_vector(float *, const float *, int size, int first, int half)
    int check_step(const Model *, const Step *, char *reason, size_t room)
    int plan_step(Model *, const Step *)
    void run_step(Model *, const Step *)
    int choose_tokens(const Choice *, const Kernels *, int threads)
    double c_read_rate "read_rate" (size_t bytes, int threads, int tries)


DTYPES = {"float32": FLOAT32, "bfloat16": BFLOAT16}


def variants(dtype):
    """Return the instruction sets with kernels of `dtype` that this processor can run, the fastest first."""
    cdef const Kernels *kernels
    cdef int number = _dtype(dtype), index = 0
    names = []
    while True:
        kernels = list_kernels(number, index)
        if kernels == NULL:
            return tuple(names)
        names.append(kernels.name.decode())
        index += 1


def read_rate(size, threads, tries=3):
    """Return the bandwidth of reading `size` bytes on `threads` threads, in bytes/s; the best of `tries`."""
    cdef size_t amount = _integer("size", size, 1 << 20, 1 << 40)
    cdef int count = _integer("threads", threads, 1, THREADS_AT_MOST), passes = _integer("tries", tries, 1, 1000)
    cdef double rate
    with nogil:
        rate = c_read_rate(amount, count, passes)
    if rate == 0:
        raise MemoryError(f"{size} bytes to read")
    return rate


def choose(logits, temperatures, top_k, top_p, least, numbers, tokens, highest, *, greedy_below, threads=1,
           variant=None):
    """Choose the next token of each row of `logits` [S, V]; write `tokens` (int64) and `highest` (float32).

    `logits` is float32. All other arrays have length S, else ValueError. `highest` is the row's highest
    logit, or NaN if the row has a NaN; the token is undefined if `highest` is NaN or −inf. A row whose
    temperature (float32) is below `greedy_below` gets the first of its highest logits. Otherwise a score is
    (logit − highest) / temperature. These filters apply in order: at least `least` (float32), among the
    `top_k` highest (int32; 0: off), and in the nucleus with the fraction `top_p` (float64; 1: off) of the
    remaining weight. The token is where the cumulative weight, in vocabulary order, exceeds the fraction
    `numbers` (float64, 0 to 1) of the rest. Rows run on `threads` threads and are independent.
    """
    cdef const float[:, ::1] rows = logits
    cdef const float[::1] heat = temperatures, floors = least
    cdef const int32_t[::1] most = top_k
    cdef const double[::1] shares = top_p, draws = numbers
    cdef int64_t[::1] chosen = tokens
    cdef float[::1] tops = highest
    cdef Choice choice
    cdef const Kernels *kernels
    cdef int failed, count = _integer("threads", threads, 1, THREADS_AT_MOST)
    name = b"" if variant is None else variant.encode()
    cdef const char *wanted = name
    for what, length in (("temperatures", len(heat)), ("top_k", len(most)), ("top_p", len(shares)),
                         ("least", len(floors)), ("numbers", len(draws)), ("tokens", len(chosen)),
                         ("highest", len(tops))):
        if length != rows.shape[0]:
            raise ValueError(f"{what}: {length} for {rows.shape[0]} rows of logits")
    if rows.shape[1] == 0 or rows.shape[1] > 1 << 24:
        raise ValueError(f"logits: rows of {rows.shape[1]}")
    kernels = find_kernels(FLOAT32, wanted if variant is not None else <const char *> NULL)
    if kernels == NULL:
        raise ValueError(f"variant: {variant!r} is not one of {', '.join(variants('float32'))}")
    if rows.shape[0] == 0:
        return
    choice.rows, choice.vocabulary = <int> rows.shape[0], <int> rows.shape[1]
    choice.logits, choice.stride = &rows[0, 0], rows.shape[1]
    choice.temperatures, choice.greedy_below = &heat[0], greedy_below
    choice.top_k, choice.top_p, choice.least, choice.numbers = &most[0], &shares[0], &floors[0], &draws[0]
    choice.tokens, choice.highest = &chosen[0], &tops[0]
    with nogil:
        failed = choose_tokens(&choice, kernels, count)
    if failed:
        raise MemoryError("scores of a row")


cdef class CpuModel:
    """A decoder's weights, KV cache and step.

    First `pack` everything that `missing` names, then `allocate_cache`, then call `run` for each step.
    `windows`: by KV cache group, the tokens that a query attends to, its own included; None: all.
    `ropes`: by rotary variant, the radians a position of each channel pair, float32, and a factor of cosine
    and sine; the first 2 · len channels of a head rotate. `layer_groups`, `layer_ropes`: indices by layer.
    `quantization`: "int8" keeps matrices in 8 bits, with one scale for each output; the rest is unchanged.
    """

    cdef Model model
    cdef Step step
    cdef bint busy, complete
    cdef dict packed          # (layer or None, name): rows packed so far
    cdef readonly str variant, dtype
    cdef readonly int threads

    def __cinit__(self, *, dtype, vocab_size, hidden_size, intermediate_size, layers, heads, kv_heads, head_dim,
                  norm_epsilon, ropes, windows=(None,), layer_groups=None, layer_ropes=None, tied=False, qkv_bias=False,
                  output_bias=False, mlp_bias=False, query_key_norm=False, post_norms=False, gelu=False,
                  embedding_scale=1.0, attention_scale=None, attention_cap=0.0, logit_cap=0.0, threads=1,
                  max_batched_tokens=512, variant=None, quantization=None):
        cdef Model *model = &self.model
        cdef Shape *shape = &model.shape
        cdef const char *wanted
        shape.dtype = _dtype(dtype)
        self.dtype = dtype
        shape.vocabulary = _integer("vocab_size", vocab_size, 1, 1 << 24)
        shape.hidden = _integer("hidden_size", hidden_size, 1, 1 << 16)
        shape.inner = _integer("intermediate_size", intermediate_size, 1, 1 << 20)
        shape.layers = _integer("layers", layers, 1, 10_000)
        shape.heads = _integer("heads", heads, 1, 1024)
        shape.kv_heads = _integer("kv_heads", kv_heads, 1, 1024)
        shape.head_dim = _integer("head_dim", head_dim, 2, HEAD_AT_MOST)
        if shape.heads % shape.kv_heads:
            raise ValueError(f"kv_heads: {kv_heads} does not divide {heads} heads")
        if shape.head_dim % 2:
            raise ValueError(f"head_dim: {head_dim} is odd")
        shape.tied, shape.qkv_bias, shape.output_bias = bool(tied), bool(qkv_bias), bool(output_bias)
        shape.mlp_bias, shape.query_key_norm = bool(mlp_bias), bool(query_key_norm)
        shape.post_norms, shape.gelu = bool(post_norms), bool(gelu)
        if quantization not in {None, "int8"}:
            raise ValueError(f"quantization: {quantization!r} is neither None nor 'int8'")
        shape.int8 = quantization is not None
        shape.epsilon = _number("norm_epsilon", norm_epsilon)
        shape.embedding_scale = _number("embedding_scale", embedding_scale)
        if attention_scale is None:
            attention_scale = shape.head_dim ** -0.5
        shape.attention_scale = _number("attention_scale", attention_scale)
        shape.attention_cap = _number("attention_cap", attention_cap)
        shape.logit_cap = _number("logit_cap", logit_cap)
        shape.threads = self.threads = _integer("threads", threads, 1, THREADS_AT_MOST)
        shape.tokens_at_most = _integer("max_batched_tokens", max_batched_tokens, 1, 1 << 16)
        name = b"" if variant is None else variant.encode()
        wanted = name
        model.kernels = find_kernels(shape.dtype, wanted if variant is not None else <const char *> NULL)
        if model.kernels == NULL:
            raise ValueError(f"variant: {variant!r} is not one of {', '.join(variants(dtype))}")
        self.variant = model.kernels.name.decode()
        model.element = sizeof(float) if shape.dtype == FLOAT32 else sizeof(uint16_t)
        model.page_bytes = model.element * BLOCK * padded(shape.head_dim)
        self._set_groups(windows, ropes)
        model.layers = <Layer *> calloc(shape.layers, sizeof(Layer))
        if model.layers == NULL:
            raise MemoryError
        self._set_layers(layer_groups, layer_ropes)
        if lay_out_weights(model) or lay_out_work(model):
            raise MemoryError(f"{model.weights_bytes + model.work_bytes} bytes for weights and buffers")
        self.packed = {name: 0 for name in self._expected()}

    def __dealloc__(self):
        free_model(&self.model)

    cdef _set_groups(self, windows, ropes):
        cdef Shape *shape = &self.model.shape
        cdef const float[::1] frequencies
        shape.groups = _integer("windows: their number", len(windows), 1, GROUPS_AT_MOST)
        for group, window in enumerate(windows):
            shape.windows[group] = 0 if window is None else _integer("windows", window, 1, (1 << 31) - 1)
        shape.ropes = _integer("ropes: their number", len(ropes), 1, ROPES_AT_MOST)
        for rope, (given, scale) in enumerate(ropes):
            frequencies = given
            if not 0 <= 2 * len(frequencies) <= shape.head_dim:
                raise ValueError(f"ropes[{rope}]: {len(frequencies)} pairs in a head of {shape.head_dim} channels")
            shape.rotated[rope] = 2 * <int> len(frequencies)
            shape.rope_scale[rope] = _number(f"ropes[{rope}]", scale)
            self.model.frequencies[rope] = <float *> malloc(max(1, len(frequencies)) * sizeof(float))
            if self.model.frequencies[rope] == NULL:
                raise MemoryError
            if len(frequencies):
                memcpy(self.model.frequencies[rope], &frequencies[0], len(frequencies) * sizeof(float))

    cdef _set_layers(self, groups, ropes):
        cdef Shape *shape = &self.model.shape
        groups = (0,) * shape.layers if groups is None else groups
        ropes = (0,) * shape.layers if ropes is None else ropes
        if len(groups) != shape.layers or len(ropes) != shape.layers:
            raise ValueError("layer_groups, layer_ropes: must have one entry a layer")
        for layer in range(shape.layers):
            self.model.layers[<int> layer].group = _integer("layer_groups", groups[layer], 0, shape.groups - 1)
            self.model.layers[<int> layer].rope = _integer("layer_ropes", ropes[layer], 0, shape.ropes - 1)

    def _expected(self):
        cdef Shape *shape = &self.model.shape
        yield from ((None, name) for name in ("embedding", "norm"))
        if not shape.tied:
            yield None, "head"
        names = ["query", "key", "value", "output", "gate", "up", "down", "attention_norm", "mlp_norm"]
        names += ["query_bias", "key_bias", "value_bias"] if shape.qkv_bias else []
        names += ["output_bias"] if shape.output_bias else []
        names += ["gate_bias", "up_bias", "down_bias"] if shape.mlp_bias else []
        names += ["query_norm", "key_norm"] if shape.query_key_norm else []
        names += ["post_attention_norm", "post_mlp_norm"] if shape.post_norms else []
        yield from ((layer, name) for layer in range(shape.layers) for name in names)

    @property
    def weight_bytes(self):
        """The bytes of the packed weights, padding included."""
        return self.model.weights_bytes

    @property
    def cache_bytes(self):
        """The bytes reserved for the KV cache; the system provides them when they are first written."""
        return self.model.cache_bytes

    @property
    def work_bytes(self):
        """The bytes of the buffers between the layers."""
        return self.model.work_bytes

    @property
    def block_size(self):
        """The number of tokens in a block."""
        return BLOCK

    def block_bytes(self, group):
        """Return the bytes of one block of this KV cache group, over all its layers."""
        cdef int layer, count = 0
        for layer in range(self.model.shape.layers):
            count += self.model.layers[layer].group == group
        return count * self.model.shape.kv_heads * 2 * self.model.page_bytes

    def missing(self):
        """Return the tensors still to be packed: [(layer or None, name)]."""
        return [name for name, rows in self.packed.items() if rows < self._rows(name[1])]

    def rows(self, name):
        """Return the shape that `pack` expects: (outputs, inputs) of a matrix, (size,) of a vector."""
        inputs = self._inputs(name)
        if inputs:
            return self._rows(name), inputs
        return (self._rows(name),)

    def pack(self, name, buffer, *, layer=None):
        """Copy the next rows of a matrix, [rows, inputs], or a whole vector, [size]; `buffer` is not kept.

        A matrix is in the model's dtype (bfloat16 as uint16) and may come in several pieces, from the first
        row on; a vector is float32. ValueError: a name that this model does not have, more rows than are
        missing, another shape, or a number that is infinite or NaN.
        """
        cdef const uint16_t[:, ::1] halves
        cdef const float[:, ::1] floats
        cdef const float[::1] vector
        cdef const void *source
        cdef int64_t bad
        key = layer, name
        where = name if layer is None else f"layer {layer}: {name}"
        if key not in self.packed:
            raise ValueError(f"{where}: this model has no such tensor")
        self._enter()
        try:
            done, rows, inputs = self.packed[key], self._rows(name), self._inputs(name)
            if inputs == 0:
                vector = buffer
                if done or len(vector) != rows:
                    raise ValueError(f"{where}: {len(vector)} numbers, expected {rows - done}")
                bad = self._pack_vector(-1 if layer is None else layer, name, vector)
                if bad >= 0:
                    raise ValueError(f"{where}: the number at {bad} is {vector[bad]}")
                self.packed[key] = rows
                return
            if self.model.shape.dtype == BFLOAT16:
                halves = buffer
                shape = halves.shape[0], halves.shape[1]
                source = &halves[0, 0] if shape[0] and shape[1] else NULL
            else:
                floats = buffer
                shape = floats.shape[0], floats.shape[1]
                source = &floats[0, 0] if shape[0] and shape[1] else NULL
            if shape[1] != inputs or done + shape[0] > rows:
                raise ValueError(f"{where}: {list(shape)} numbers, expected {[rows - done, inputs]}")
            if source == NULL:
                return
            bad = self._pack_matrix(-1 if layer is None else layer, name, source, shape[0], inputs, done)
            if bad >= 0:
                raise ValueError(f"{where}: the number at {[done + bad // inputs, bad % inputs]} is infinite or NaN")
            self.packed[key] = done + shape[0]
        finally:
            self.busy = False

    def allocate_cache(self, blocks):
        """Create a new KV cache, all zero, with `blocks[g]` blocks of group g. Memory is used on write."""
        cdef int counts[8]
        cdef Shape *shape = &self.model.shape
        if len(blocks) != shape.groups:
            raise ValueError(f"blocks: {len(blocks)} numbers for {shape.groups} groups")
        for group, count in enumerate(blocks):
            counts[<int> group] = _integer("blocks", count, 1, ((1 << 31) - 1) // BLOCK)
        self._enter()
        try:
            if lay_out_cache(&self.model, counts):
                raise MemoryError(f"a KV cache of {list(blocks)} blocks")
        finally:
            self.busy = False

    def release(self, group, blocks):
        """Return the memory of these blocks of a group to the system. They read as zero until written again.

        `blocks`: ascending. Adjacent blocks are released together, because only whole pages can be returned.
        """
        cdef int own = _integer("group", group, 0, self.model.shape.groups - 1)
        cdef int block, first = -1, count = 0
        if self.model.cache_memory == NULL:
            raise ValueError("there is no KV cache yet")
        ids = [_integer("blocks", each, 0, self.model.blocks[own] - 1) for each in blocks]
        self._enter()
        try:
            for block in ids:
                if count and block == first + count:
                    count += 1
                    continue
                if count:
                    release_blocks(&self.model, own, first, count)
                first, count = block, 1
            if count:
                release_blocks(&self.model, own, first, count)
        finally:
            self.busy = False

    def run(self, input_ids, positions, slot_mapping, query_starts, sequence_lengths, slots, block_tables,
            sample_rows, logits):
        """Run all tokens through all layers; write float32 `logits` [S, vocab], a row for each that samples.

        int32: `input_ids`, `positions` [T]; `slot_mapping`, by group, [T], block · 16 + offset;
        `query_starts` [B + 1]; `sequence_lengths` [B], this step's tokens included; `slots` [B], the rows of
        `block_tables`, by group, [slots, blocks]; `sample_rows` [S], ascending. Raise ValueError and change
        nothing if an argument is wrong. A block that belongs to two sequences is not detected.
        """
        cdef char reason[256]
        cdef Shape *shape = &self.model.shape
        cdef Step *step = &self.step
        cdef const int32_t[::1] ids = input_ids, places = positions, starts = query_starts
        cdef const int32_t[::1] lengths = sequence_lengths, rows = slots, samples = sample_rows, mapping
        cdef const int32_t[:, ::1] table
        cdef float[:, ::1] out = logits
        cdef int group, failed
        buffers = []  # keeps the buffers alive until the step has ended
        if self.model.cache_memory == NULL:
            raise ValueError("there is no KV cache yet")
        if not self.complete:
            if left := self.missing():
                raise ValueError(f"{len(left)} tensors were not packed, {left[0]} is the first")
            self.complete = True
        if len(places) != len(ids):
            raise ValueError(f"positions: {len(places)} for {len(ids)} tokens")
        if len(starts) != len(lengths) + 1 or len(rows) != len(lengths):
            raise ValueError(f"query_starts, sequence_lengths, slots: {len(starts)}, {len(lengths)}, {len(rows)} numbers")
        if len(slot_mapping) != shape.groups or len(block_tables) != shape.groups:
            raise ValueError(f"slot_mapping, block_tables: one is needed for each of {shape.groups} groups")
        if len(ids) == 0 or len(lengths) == 0:
            raise ValueError("input_ids: there are no tokens")
        if len(samples) and (out.shape[0] < len(samples) or out.shape[1] != shape.vocabulary):
            raise ValueError(f"logits: [{out.shape[0]}, {out.shape[1]}], expected [{len(samples)}, {shape.vocabulary}]")
        self._enter()
        try:
            step.tokens, step.rows, step.samples = <int> len(ids), <int> len(lengths), <int> len(samples)
            step.input_ids, step.positions, step.query_starts = &ids[0], &places[0], &starts[0]
            step.sequence_lengths, step.slots = &lengths[0], &rows[0]
            step.sample_rows = &samples[0] if len(samples) else NULL
            step.logits = &out[0, 0] if len(samples) else NULL
            step.logits_stride = shape.vocabulary
            for group in range(shape.groups):
                mapping, table = slot_mapping[group], block_tables[group]
                buffers.append((mapping, table))
                if len(mapping) != len(ids):
                    raise ValueError(f"slot_mapping of group {group}: {len(mapping)} for {len(ids)} tokens")
                if table.shape[0] == 0 or table.shape[1] == 0:
                    raise ValueError(f"block table of group {group}: it is empty")
                step.slot_mapping[group], step.tables[group] = &mapping[0], &table[0, 0]
                step.table_rows[group], step.table_width[group] = <int> table.shape[0], <int> table.shape[1]
            with nogil:
                failed = check_step(&self.model, step, reason, sizeof(reason))
                if not failed and plan_step(&self.model, step):
                    failed = -1
                if not failed:
                    run_step(&self.model, step)
            if failed > 0:
                raise ValueError(reason.decode())
            if failed:
                raise MemoryError("the tasks of a step")
        finally:
            self.busy = False

    cdef _enter(self):
        if self.busy:
            raise RuntimeError("this model runs on another thread")
        self.busy = True

    cdef int _rows(self, str name):
        cdef Shape *shape = &self.model.shape
        if name.startswith("query_b") or name == "query":
            return shape.heads * shape.head_dim
        if name in {"key", "value", "key_bias", "value_bias"}:
            return shape.kv_heads * shape.head_dim
        if name in {"gate", "up", "gate_bias", "up_bias"}:
            return shape.inner
        if name in {"embedding", "head"}:
            return shape.vocabulary
        if name in {"query_norm", "key_norm"}:
            return shape.head_dim
        return shape.hidden

    cdef int _inputs(self, str name):
        # The number of columns of a matrix, or 0 for a vector.
        cdef Shape *shape = &self.model.shape
        if name == "output":
            return shape.heads * shape.head_dim
        if name == "down":
            return shape.inner
        return shape.hidden if name in {"embedding", "head", "query", "key", "value", "gate", "up"} else 0

    cdef int64_t _pack_matrix(self, int layer, str name, const void *source, int rows, int inputs, int first):
        cdef Model *model = &self.model
        cdef Shape *shape = &model.shape
        cdef void *matrix
        cdef float *scales
        cdef int64_t bad
        cdef int half = GATE_HALF if name == "gate" else UP_HALF if name == "up" else PLAIN
        if layer < 0:
            matrix = model.embedding if name == "embedding" else model.head
            scales = model.embedding_scales if name == "embedding" else model.head_scales
        else:
            index = {"output": OUTPUT, "gate": GATE_UP, "up": GATE_UP, "down": DOWN}.get(name, QKV)
            matrix = model.layers[layer].matrices[<int> index]
            scales = model.layers[layer].scales[<int> index]
            first += self._fused(name)
        with nogil:
            bad = pack_matrix(model, matrix, scales, source, rows, inputs, first, half)
        return bad

    cdef int64_t _pack_vector(self, int layer, str name, const float[::1] source):
        cdef float *vector = self.model.final_norm
        cdef int half = GATE_HALF if name == "gate_bias" else UP_HALF if name == "up_bias" else PLAIN
        cdef int first = 0
        if layer >= 0:
            index = _VECTOR_INDICES[name]
            vector = self.model.layers[layer].vectors[<int> index]
            first = self._fused(name.removesuffix("_bias")) if name.endswith("_bias") else 0
        return pack_vector(vector, &source[0], <int> len(source), first, half)

    cdef int _fused(self, str name):
        # The first row of `name` in the fused matrix of queries, keys and values.
        cdef Shape *shape = &self.model.shape
        if name == "key":
            return shape.heads * shape.head_dim
        return (shape.heads + shape.kv_heads) * shape.head_dim if name == "value" else 0


_VECTOR_INDICES = {
    "attention_norm": ATTENTION_NORM,
    "query_norm": QUERY_NORM,
    "key_norm": KEY_NORM,
    "post_attention_norm": POST_ATTENTION_NORM,
    "mlp_norm": MLP_NORM,
    "post_mlp_norm": POST_MLP_NORM,
    "query_bias": QKV_BIAS,
    "key_bias": QKV_BIAS,
    "value_bias": QKV_BIAS,
    "output_bias": OUTPUT_BIAS,
    "gate_bias": GATE_UP_BIAS,
    "up_bias": GATE_UP_BIAS,
    "down_bias": DOWN_BIAS,
}


def _dtype(name):
    if name not in DTYPES:
        raise ValueError(f"dtype: {name!r} is not one of {', '.join(DTYPES)}")
    return DTYPES[name]


def _integer(name, value, least, most):
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: must be an integer, not {value!r}")
    if not least <= value <= most:
        raise ValueError(f"{name}: must be from {least} to {most}, not {value}")
    return value


def _number(name, value):
    number = float(value)
    if not math.isfinite(number) or number < 0:
        raise ValueError(f"{name}: must be finite and not negative, not {value}")
    return number

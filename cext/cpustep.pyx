# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
# cython: annotation_typing=False, auto_pickle=False, autotestdict=False
"""The CPU kernel of a dense decoder: a whole step, from token ids to logits, in one call.

Owns the packed weights and the pages of the KV cache; `cpustep/cpustep.h` has their layouts. It does not use
checkpoints, sequences, samplers or torch. Every argument that becomes an address is checked: a wrong one
raises ValueError before anything has changed. A step runs without the GIL; a model runs one step at a time.
"""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t
from libc.stdlib cimport calloc, malloc
from libc.string cimport memcpy

from cpustep.arguments cimport integer, number, read_choice, read_masks, read_step
from cpustep.declarations cimport (
    BFLOAT16, BLOCK, FLOAT32, FORMATS, GROUPS_AT_MOST, HEAD_AT_MOST, ROPES_AT_MOST, THREADS_AT_MOST, Choice, Format, Kernels,
    Layer, Model, Shape, Step, Tensor, c_read_rate, check_step, choose_tokens, find_format, find_kernels, find_matrix_format,
    find_tensor,
    free_model, lay_out_cache, lay_out_weights, lay_out_work, list_kernels, pack_matrix, pack_vector, padded, plan_step, row_bytes,
    release_blocks, run_step, tensor_name,
)

DTYPES = {"float32": FLOAT32, "bfloat16": BFLOAT16}


def variants(dtype):
    """Return the instruction sets with kernels of `dtype` that this processor can run, the fastest first."""
    cdef const Kernels *kernels = list_kernels(_dtype(dtype), 0)
    names = []
    while kernels != NULL:
        names.append(kernels.name.decode())
        kernels = list_kernels(_dtype(dtype), <int> len(names))
    return tuple(names)


cdef const Kernels *kernels_of(dtype, variant) except NULL:
    # The fastest that run here if `variant` is None.
    name = b"" if variant is None else variant.encode()
    cdef const char *wanted = name
    cdef const Kernels *kernels
    kernels = find_kernels(_dtype(dtype), wanted if variant is not None else <const char *> NULL)
    if kernels == NULL:
        raise ValueError(f"variant: {variant!r} is not one of {', '.join(variants(dtype))}")
    return kernels


def formats(dtype, variant=None):
    """Return the formats that numbers are packed in; the first, "none", is the dtype itself."""
    return format_names(kernels_of(dtype, variant), False)


def stored_formats(dtype, variant=None):
    """Return the formats that rows are packed in as a checkpoint has them, by ggml's names in small letters."""
    return format_names(kernels_of(dtype, variant), True)


cdef format_names(const Kernels *kernels, bint stored):
    cdef int index = 0
    names = []
    while kernels.formats[index] != NULL:
        if (kernels.formats[index].stored != NULL) == stored:
            names.append(kernels.formats[index].name.decode())
        index += 1
    return tuple(names)


cdef const Format *format_of(const Kernels *kernels, quantization, bint stored=False) except NULL:
    cdef const Format *format = NULL
    if quantization is None:
        quantization = "none"
    if isinstance(quantization, str):
        name = quantization.encode()
        format = find_format(kernels, name)
    if format == NULL or (format.stored != NULL) != stored:
        names = ", ".join(format_names(kernels, stored))
        raise ValueError(f"{'stored' if stored else 'quantization'}: {quantization!r} is not one of {names}")
    return format


def read_rate(size, threads, tries=3):
    """Return the bandwidth of reading `size` bytes on `threads` threads, in bytes/s; the best of `tries`."""
    cdef size_t amount = integer("size", size, 1 << 20, 1 << 40)
    cdef int count = integer("threads", threads, 1, THREADS_AT_MOST), passes = integer("tries", tries, 1, 1000)
    cdef double rate
    with nogil:
        rate = c_read_rate(amount, count, passes)
    if rate == 0:
        raise MemoryError(f"{size} bytes to read")
    return rate


def choose(logits, temperatures, top_k, top_p, least, numbers, tokens, highest, *, greedy_below, threads=1,
           variant=None, masks=None, mask_rows=None):
    """Choose the next token of each row of `logits` [S, V]; write `tokens` (int64) and `highest` (float32).

    `logits` is float32. All other arrays have length S, else ValueError. `highest` is the row's highest
    logit, or NaN if the row has a NaN; the token is undefined if `highest` is NaN or −inf. If a
    row's temperature (float32) is below `greedy_below`, it gets the first of its highest logits. Otherwise a
    score is (logit − highest) / temperature. These filters apply in order: at least `least` (float32), among the
    `top_k` highest (int32; 0: off), and in the nucleus with the fraction `top_p` (float64; 1: off) of the
    remaining weight. The token is where the cumulative weight, in vocabulary order, exceeds the fraction
    `numbers` (float64, 0 to 1) of the rest. Rows run on `threads` threads and are independent.

    `masks` [M, ⌈V / 32⌉], uint32, has a bit for each token that may be chosen; `mask_rows` [S], int32, the
    index of each row's mask, or −1. Other tokens count as −inf.
    """
    cdef const float[:, ::1] rows = logits
    cdef const float[::1] heat = temperatures, floors = least
    cdef const int32_t[::1] most = top_k
    cdef const double[::1] shares = top_p, draws = numbers
    cdef int64_t[::1] chosen = tokens
    cdef float[::1] tops = highest
    cdef Choice choice
    cdef const Kernels *kernels = kernels_of("float32", variant)
    cdef int failed, count = integer("threads", threads, 1, THREADS_AT_MOST)
    read_choice(&choice, rows, heat, most, shares, floors, draws, chosen, tops)
    choice.greedy_below = greedy_below
    read_masks(&choice, masks, mask_rows)
    if choice.rows == 0:
        return
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
    `quantization`: one of `formats`, in which all matrices are kept; None: as "none", in the model's dtype.
    `stored`: by (layer or None, name), the one of `stored_formats` in which a matrix comes and is kept. Gate and up
    of a layer have the same. Queries, keys and values may differ if the first two have whole panels of 32 rows.
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
                  max_batched_tokens=512, variant=None, quantization=None, stored=None):
        cdef Model *model = &self.model
        cdef Shape *shape = &model.shape
        cdef Tensor tensor
        cdef int index, layer
        shape.dtype = _dtype(dtype)
        self.dtype = dtype
        shape.vocabulary = integer("vocab_size", vocab_size, 1, 1 << 24)
        shape.hidden = integer("hidden_size", hidden_size, 1, 1 << 16)
        shape.inner = integer("intermediate_size", intermediate_size, 1, 1 << 20)
        shape.layers = integer("layers", layers, 1, 10_000)
        shape.heads = integer("heads", heads, 1, 1024)
        shape.kv_heads = integer("kv_heads", kv_heads, 1, 1024)
        shape.head_dim = integer("head_dim", head_dim, 2, HEAD_AT_MOST)
        if shape.heads % shape.kv_heads:
            raise ValueError(f"kv_heads: {kv_heads} does not divide {heads} heads")
        if shape.head_dim % 2:
            raise ValueError(f"head_dim: {head_dim} is odd")
        shape.tied, shape.qkv_bias, shape.output_bias = bool(tied), bool(qkv_bias), bool(output_bias)
        shape.mlp_bias, shape.query_key_norm = bool(mlp_bias), bool(query_key_norm)
        shape.post_norms, shape.gelu = bool(post_norms), bool(gelu)
        shape.epsilon = number("norm_epsilon", norm_epsilon)
        shape.embedding_scale = number("embedding_scale", embedding_scale)
        if attention_scale is None:
            attention_scale = shape.head_dim ** -0.5
        shape.attention_scale = number("attention_scale", attention_scale)
        shape.attention_cap = number("attention_cap", attention_cap)
        shape.logit_cap = number("logit_cap", logit_cap)
        shape.threads = self.threads = integer("threads", threads, 1, THREADS_AT_MOST)
        shape.tokens_at_most = integer("max_batched_tokens", max_batched_tokens, 1, 1 << 16)
        model.kernels = kernels_of(dtype, variant)
        self.variant = model.kernels.name.decode()
        model.element = sizeof(float) if shape.dtype == FLOAT32 else sizeof(uint16_t)
        model.page_bytes = model.element * BLOCK * padded(shape.head_dim)
        self._set_groups(windows, ropes)
        model.layers = <Layer *> calloc(shape.layers, sizeof(Layer))
        if model.layers == NULL:
            raise MemoryError
        self._set_layers(layer_groups, layer_ropes)
        self._set_formats(quantization, {} if stored is None else stored)
        if lay_out_weights(model) or lay_out_work(model):
            raise MemoryError(f"{model.weights_bytes + model.work_bytes} bytes for weights and buffers")
        self.packed = {}
        for layer in range(-1, shape.layers):
            index = 0
            while tensor_name(index) != NULL:
                if find_tensor(model, layer, tensor_name(index), &tensor):
                    self.packed[None if layer < 0 else layer, tensor_name(index).decode()] = 0
                index += 1

    def __dealloc__(self):
        free_model(&self.model)

    cdef _set_groups(self, windows, ropes):
        cdef Shape *shape = &self.model.shape
        cdef const float[::1] frequencies
        shape.groups = integer("windows: their number", len(windows), 1, GROUPS_AT_MOST)
        for group, window in enumerate(windows):
            shape.windows[group] = 0 if window is None else integer("windows", window, 1, (1 << 31) - 1)
        shape.ropes = integer("ropes: their number", len(ropes), 1, ROPES_AT_MOST)
        for rope, (given, scale) in enumerate(ropes):
            frequencies = given
            if not 0 <= 2 * len(frequencies) <= shape.head_dim:
                raise ValueError(f"ropes[{rope}]: {len(frequencies)} pairs in a head of {shape.head_dim} channels")
            shape.rotated[rope] = 2 * <int> len(frequencies)
            shape.rope_scale[rope] = number(f"ropes[{rope}]", scale)
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
            self.model.layers[<int> layer].group = integer("layer_groups", groups[layer], 0, shape.groups - 1)
            self.model.layers[<int> layer].rope = integer("layer_ropes", ropes[layer], 0, shape.ropes - 1)

    cdef _set_formats(self, quantization, stored):
        cdef Shape *shape = &self.model.shape
        cdef const Format *common = format_of(self.model.kernels, quantization)
        cdef const Format **at
        cdef const Format **formats
        cdef int layer, index
        self.model.embedding_format = self.model.head_format = common
        for layer in range(shape.layers):
            for index in range(FORMATS):
                self.model.layers[layer].formats[index] = common
        for (key, name), form in stored.items():
            encoded = name.encode()
            layer = -1 if key is None else integer("stored", key, 0, shape.layers - 1)
            if not find_matrix_format(&self.model, layer, encoded, &at):
                raise ValueError(f"stored: this model has no matrix {name} in {'it' if key is None else f'layer {key}'}")
            at[0] = format_of(self.model.kernels, form, True)
        for layer in range(shape.layers):
            if (stored.get((layer, "gate")) != stored.get((layer, "up"))):
                raise ValueError(f"stored: gate and up of layer {layer} differ")
            formats = self.model.layers[layer].formats
            if (formats[0] != formats[1] or formats[0] != formats[2]) and (
                shape.heads * shape.head_dim % 32 or shape.kv_heads * shape.head_dim % 32
            ):
                raise ValueError(f"stored: query, key and value of layer {layer} differ, and have no whole panels")

    cdef Tensor _tensor(self, layer, name) except *:
        cdef Tensor tensor
        encoded = name.encode()
        if not find_tensor(&self.model, -1 if layer is None else layer, encoded, &tensor):
            raise ValueError(f"{name}: this model has no such tensor")
        return tensor

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
        return [key for key, rows in self.packed.items() if rows < self._tensor(key[0], key[1]).rows]

    def rows(self, name):
        """Return the shape that `pack` expects: (outputs, inputs) of a matrix, (size,) of a vector."""
        cdef Tensor tensor = self._tensor(None if (None, name) in self.packed else 0, name)
        if tensor.inputs:
            return tensor.rows, tensor.inputs
        return (tensor.rows,)

    def pack(self, name, buffer, *, layer=None):
        """Copy the next rows of a matrix, [rows, inputs], or a whole vector, [size]; `buffer` is not kept.

        A matrix is in the model's dtype (bfloat16 as uint16), or blocks [rows, bytes] of uint8 if it was named in
        `stored`. It may come in several pieces, from the first
        row on; a vector is float32. ValueError: a name that this model does not have, more rows than are
        missing, another shape, or a number that is infinite or NaN.
        """
        cdef const uint16_t[:, ::1] halves
        cdef const float[:, ::1] floats
        cdef const uint8_t[:, ::1] blocks
        cdef const float[::1] vector
        cdef const void *source = NULL
        cdef Tensor tensor
        cdef int64_t bad
        cdef int first, count
        key = layer, name
        where = name if layer is None else f"layer {layer}: {name}"
        if key not in self.packed:
            raise ValueError(f"{where}: this model has no such tensor")
        self._enter()
        try:
            done, tensor = self.packed[key], self._tensor(layer, name)
            if tensor.inputs == 0:
                vector = buffer
                if done or len(vector) != tensor.rows:
                    raise ValueError(f"{where}: {len(vector)} numbers, expected {tensor.rows - done}")
                bad = pack_vector(&tensor, &vector[0])
                if bad >= 0:
                    raise ValueError(f"{where}: the number at {bad} is {vector[bad]}")
                self.packed[key] = tensor.rows
                return
            inputs = tensor.inputs
            if tensor.matrix.format.stored != NULL:
                blocks = buffer
                rows = blocks.shape[0]
                if blocks.shape[1] != <Py_ssize_t> row_bytes(&self.model, &tensor):
                    raise ValueError(f"{where}: rows of {blocks.shape[1]} bytes, expected {row_bytes(&self.model, &tensor)}")
                if rows:
                    source = &blocks[0, 0]
            elif self.model.shape.dtype == BFLOAT16:
                halves = buffer
                rows, inputs = halves.shape[0], halves.shape[1]
                if rows and inputs:
                    source = &halves[0, 0]
            else:
                floats = buffer
                rows, inputs = floats.shape[0], floats.shape[1]
                if rows and inputs:
                    source = &floats[0, 0]
            if inputs != tensor.inputs or done + rows > tensor.rows:
                raise ValueError(f"{where}: {[rows, inputs]} numbers, expected {[tensor.rows - done, tensor.inputs]}")
            if source == NULL:
                return
            first, count = done, rows
            with nogil:
                bad = pack_matrix(&self.model, &tensor, source, first, count)
            if bad >= 0:
                raise ValueError(f"{where}: the number at {[done + bad // inputs, bad % inputs]} is infinite or NaN")
            self.packed[key] = done + rows
        finally:
            self.busy = False

    def allocate_cache(self, blocks):
        """Create a new KV cache, all zero, with `blocks[g]` blocks of group g. Memory is used on write."""
        cdef int counts[8]
        cdef Shape *shape = &self.model.shape
        if len(blocks) != shape.groups:
            raise ValueError(f"blocks: {len(blocks)} numbers for {shape.groups} groups")
        for group, count in enumerate(blocks):
            counts[<int> group] = integer("blocks", count, 1, ((1 << 31) - 1) // BLOCK)
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
        cdef int own = integer("group", group, 0, self.model.shape.groups - 1)
        cdef int begin = 0, end
        if self.model.cache_memory == NULL:
            raise ValueError("there is no KV cache yet")
        ids = [integer("blocks", each, 0, self.model.blocks[own] - 1) for each in blocks]
        self._enter()
        try:
            for end in range(1, len(ids) + 1):
                if end == len(ids) or ids[end] != ids[end - 1] + 1:
                    release_blocks(&self.model, own, ids[begin], end - begin)
                    begin = end
        finally:
            self.busy = False

    def run(self, input_ids, positions, slot_mapping, query_starts, sequence_lengths, slots, block_tables,
            sample_tokens, logits):
        """Run all tokens through all layers; write float32 `logits` [S, vocab], a row for each token to sample.

        int32: `input_ids`, `positions` [T]; `slot_mapping`, by group, [T], block · 16 + offset;
        `query_starts` [B + 1]; `sequence_lengths` [B], this step's tokens included; `slots` [B], the rows of
        `block_tables`, by group, [slots, blocks]; `sample_tokens` [S], ascending: any
        tokens, several of a row too; each has the logits that it would have as the last of a row. Raise ValueError and change
        nothing if an argument is wrong. A block that belongs to two sequences is not detected.
        """
        cdef char reason[256]
        cdef Step *step = &self.step
        cdef const int32_t[::1] ids = input_ids, places = positions, starts = query_starts
        cdef const int32_t[::1] lengths = sequence_lengths, rows = slots, samples = sample_tokens
        cdef float[:, ::1] out = logits
        cdef int failed
        if self.model.cache_memory == NULL:
            raise ValueError("there is no KV cache yet")
        if not self.complete:
            if left := self.missing():
                raise ValueError(f"{len(left)} tensors were not packed, {left[0]} is the first")
            self.complete = True
        self._enter()
        try:
            buffers = read_step(step, &self.model.shape, ids, places, slot_mapping, starts, lengths, rows,
                                block_tables, samples, out)
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


def _dtype(name):
    if name not in DTYPES:
        raise ValueError(f"dtype: {name!r} is not one of {', '.join(DTYPES)}")
    return DTYPES[name]

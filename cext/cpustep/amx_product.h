/* Products in AMX tiles. Weights of other formats are unpacked to bfloat16 tiles shortly before they are used, so
 * that the vector units and memory work on some blocks while the tile unit works on others.
 *
 * Tiles 0…3 hold the sums of 2 × 16 rows and 2 × 16 outputs, 4 and 5 rows of the input, 6 and 7 weights. A
 * row's sums run over the inputs in order, whatever the number of rows. */

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} __attribute__((packed)) TileShapes;

enum {
    AHEAD = 1024,     /* prefetch distance of weights, in bytes */
    FAR_AHEAD = 4096, /* the same where compute takes longer than memory: into the second-level cache only */
    AHEAD_PACKED = 2048,
    DEPTH_AT_ONCE = 8, /* blocks of 32 inputs; about a panel's part that stays in the first-level cache */
    ROWS_OF_PART = 512,
    PANELS_AT_ONCE = 6, /* their sums and a part of the rows stay in the second-level cache */
    SUMS_BYTES = ROWS_OF_PART * PANELS_AT_ONCE * PANEL * 4,
    BLOCKS_AT_MOST = DEPTH_AT_ONCE * 3 / 2, /* in a part: parts have about the same size */
    LEAD = 2,                               /* blocks that are unpacked ahead of their use, for up to 32 rows */
    RING = 4
};
/* After the sums, the scratch has two unpacked parts of a panel, or a ring of unpacked blocks. */
_Static_assert(SUMS_BYTES + 2 * BLOCKS_AT_MOST * 2 * TILE * 2 <= SCRATCH_BYTES, "a thread's scratch is too small");
_Static_assert(RING <= 2 * BLOCKS_AT_MOST && LEAD < RING, "the ring is as large as the parts, and has room to go on");

static void shape_tiles(int rows)
{
    TileShapes shapes = {.palette = 1};
    for (int tile = 0; tile < 8; tile++) {
        shapes.row_bytes[tile] = 64;
        shapes.rows[tile] = tile < 6 ? rows : 16;
    }
    _tile_loadconfig(&shapes);
}

/* Prefetch the two tiles of weights that are read a little later. `T`: the number of tiles of rows. */
ALWAYS void prefetch_panels(const int T, const bf16 *w)
{
#pragma GCC unroll 32
    for (int line = 0; line < 32; line++) {
        if (T == 2)
            _mm_prefetch((const char *)w + FAR_AHEAD + line * 64, _MM_HINT_T1);
        else
            _mm_prefetch((const char *)w + AHEAD + line * 64, _MM_HINT_T0);
    }
}

/* Complete sums. They are processed a few rows at a time between the next products, in idle vector units. */
typedef struct {
    float (*sums)[256];
    int panel, top; /* the rows begin at `top` */
    int count, done;
} Ripe;

ALWAYS void finish_some(const int kind, const Product *p, Ripe *ripe, int rows)
{
    int end = ripe->done + rows < ripe->count ? ripe->done + rows : ripe->count;
    for (int m = ripe->done; m < end; m++)
        NAME(finish)(kind, p, ripe->panel, ripe->top + m, ripe->sums[m / 16 * 2] + m % 16 * 16,
                     ripe->sums[m / 16 * 2 + 1] + m % 16 * 16);
    ripe->done = end;
}

ALWAYS void finish_rest(const int kind, const Product *p, Ripe *ripe) { finish_some(kind, p, ripe, 32); }

/* Unpack a block into two tiles, and prefetch weights that are read later. */
ALWAYS void unpack_block(const Format *format, const char *panel, int depth, int block, bf16 *to)
{
    const char *from = panel + block * format->block_bytes;
    for (size_t i = 0; i < format->block_bytes; i += 64) _mm_prefetch(from + AHEAD_PACKED + i, _MM_HINT_T0);
    format->unpack(format, panel, depth, block, to);
}

/* Multiply up to 32 rows: the weights are read once, at memory bandwidth. `T`: the number of tiles of rows.
 * `packed`: the weights must be unpacked. `ring`: room for RING blocks of them. */
ALWAYS void few_rows(const int kind, const int packed, const int T, const Product *p, int panel, float (*sums)[256],
                     bf16 *ring, Ripe *ripe)
{
    int blocks = p->depth / 32, height = p->rows < 16 ? p->rows : 16, share = (p->rows + blocks - 1) / blocks;
    const Format *format = p->weight.format;
    const char *packed_panel = panel_at(&p->weight, p->depth, panel);
    const bf16 *w = (const bf16 *)packed_panel, *a = p->input;
    const bf16 *a1 = a + 16L * p->depth;
    _tile_zero(0);
    _tile_zero(1);
    if (T == 2) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int block = 0; packed && block < LEAD && block < blocks; block++)
        unpack_block(format, packed_panel, p->depth, block, ring + block * 2 * TILE);
    for (int block = 0; block < blocks; block++, w += 2 * TILE, a += height * 32, a1 += 16 * 32) {
        if (packed) {
            if (block + LEAD < blocks)
                unpack_block(format, packed_panel, p->depth, block + LEAD, ring + (block + LEAD) % RING * 2 * TILE);
            w = ring + block % RING * 2 * TILE;
        } else {
            prefetch_panels(T, w);
        }
        _tile_loadd(6, w, 64);
        _tile_loadd(4, a, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, w + TILE, 64);
        _tile_dpbf16ps(1, 4, 7);
        if (T == 2) {
            _tile_loadd(5, a1, 64);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        finish_some(kind, p, ripe, share);
    }
    _tile_stored(0, sums[0], 64);
    _tile_stored(1, sums[1], 64);
    if (T == 2) {
        _tile_stored(2, sums[2], 64);
        _tile_stored(3, sums[3], 64);
    }
    *ripe = (Ripe){.sums = sums, .panel = panel, .count = p->rows};
}

/* The weights that are used next. They are prefetched, `lines` cache lines for each block that is multiplied. If
 * they are packed, they are unpacked into `to` at the rate of so many lines of `to`, until `left` is 0. */
typedef struct {
    const Format *format;
    const char *panel; /* of `depth` inputs; packed: `block` is next */
    int depth, block;
    const char *from;
    long then; /* packed: the distance from `from` to the weights after these, which are prefetched */
    bf16 *to;
    int left;       /* blocks */
    int lines, due; /* lines of `to` that are to be written by now */
} Coming;

ALWAYS void unpack_next(Coming *coming)
{
    size_t bytes = coming->format->block_bytes;
    for (size_t i = 0; i < bytes; i += 64) _mm_prefetch(coming->from + coming->then + i, _MM_HINT_T1);
    coming->format->unpack(coming->format, coming->panel, coming->depth, coming->block++, coming->to);
    coming->from += bytes;
    coming->to += 2 * TILE;
    coming->left--;
}

ALWAYS void unpack_due(Coming *coming)
{
    for (coming->due += coming->lines; coming->due >= 32 && coming->left > 0; coming->due -= 32) unpack_next(coming);
}

ALWAYS void unpack_rest(Coming *coming)
{
    while (coming->left > 0) unpack_next(coming);
    coming->due = 0;
}

/* Multiply 32 rows by a part of the inputs; add the result to `sums`, or store it there if `first`. */
ALWAYS void many_rows(const int kind, const int packed, const Product *p, const bf16 *a, long next_rows, const bf16 *w,
                      int blocks, int first, float (*sums)[256], Coming *coming, Ripe *ripe)
{
    const bf16 *a1 = a + next_rows;
    const char *from = coming->from;
    int share = 32 / blocks + 1, lines = coming->lines;
    if (first) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    } else {
        _tile_loadd(0, sums[0], 64);
        _tile_loadd(1, sums[1], 64);
        _tile_loadd(2, sums[2], 64);
        _tile_loadd(3, sums[3], 64);
    }
    for (int block = 0; block < blocks; block++, w += 2 * TILE, a += TILE, a1 += TILE) {
        if (packed) {
            unpack_due(coming);
        } else {
            for (int line = 0; line < lines; line++, from += 64) _mm_prefetch(from, _MM_HINT_T1);
        }
        _tile_loadd(6, w, 64);
        _tile_loadd(4, a, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, w + TILE, 64);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, a1, 64);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
        finish_some(kind, p, ripe, share);
    }
    if (!packed) coming->from = from;
    _tile_stored(0, sums[0], 64);
    _tile_stored(1, sums[1], 64);
    _tile_stored(2, sums[2], 64);
    _tile_stored(3, sums[3], 64);
}

/* Multiply some rows by up to PANELS_AT_ONCE panels. Each part of the inputs is applied to all of them before
 * the next part: input rows and weights stay in cache, at the cost of storing and reloading sums. */
ALWAYS void multiply_part_by_part(const int kind, const int packed, const Product *p, int top, int bottom,
                                  int first_panel, int last_panel, float (*sums)[256], bf16 *room)
{
    int blocks = p->depth / 32, parts = (blocks + DEPTH_AT_ONCE / 2) / DEPTH_AT_ONCE;
    /* A panel's part is prefetched while the previous one is in use. */
    int lines = (32 * 32 + bottom - top - 1) / (bottom - top);
    const Format *format = p->weight.format;
    long block_bytes = format->block_bytes, bytes_of_panel = panel_bytes(format, p->depth);
    Ripe ripe = {0};
    if (parts == 0) parts = 1;
    int buffer = 0; /* which of the two buffers is in use */
    Coming coming = {.format = format,
                     .panel = panel_at(&p->weight, p->depth, first_panel),
                     .depth = p->depth,
                     .from = panel_at(&p->weight, p->depth, first_panel),
                     .to = room,
                     .left = blocks / parts,
                     .lines = lines};
    if (packed) unpack_rest(&coming);
    for (int part = 0; part < parts; part++) {
        int block = blocks * part / parts, end = blocks * (part + 1) / parts;
        float(*at)[256] = sums;
        for (int panel = first_panel; panel < last_panel; panel++) {
            const bf16 *w = (const bf16 *)(panel_at(&p->weight, p->depth, panel) + block * block_bytes);
            int follows = panel + 1 < last_panel, next = follows ? block : end % blocks;
            coming.panel = panel_at(&p->weight, p->depth, follows ? panel + 1 : first_panel);
            coming.block = next;
            coming.from = coming.panel + next * block_bytes;
            if (packed) {
                w = room + buffer * BLOCKS_AT_MOST * 2 * TILE;
                buffer ^= 1;
                coming.to = room + buffer * BLOCKS_AT_MOST * 2 * TILE;
                int next_end = follows ? end : part + 1 < parts ? (int)((long)blocks * (part + 2) / parts) : next;
                coming.left = next_end - next;
                coming.then = bytes_of_panel;
                if (panel + 2 == last_panel)
                    coming.then = coming.left * block_bytes - (panel + 1 - first_panel) * bytes_of_panel;
            }
            for (int row = top; row < bottom; row += 32, at += 4) {
                const bf16 *a = (const bf16 *)p->input + (long)row * p->depth + block * TILE;
                /* The second half of the last 32 rows may not exist; then the first half is used twice. */
                long next_rows = row + 16 < p->rows ? 16L * p->depth : 0;
                many_rows(kind, packed, p, a, next_rows, w, end - block, part == 0, at, &coming, &ripe);
                if (part < parts - 1) continue;
                finish_rest(kind, p, &ripe);
                int count = bottom - row < 32 ? bottom - row : 32;
                ripe = (Ripe){.sums = at, .panel = panel, .top = row, .count = count};
            }
            if (packed) unpack_rest(&coming); /* the next part may have one block more */
        }
    }
    finish_rest(kind, p, &ripe);
}

ALWAYS void multiply_kind(const int kind, const int packed, const Product *p, int first_panel, int last_panel,
                          char *scratch)
{
    float(*sums)[256] = (float(*)[256])scratch;
    bf16 *room = (bf16 *)(scratch + SUMS_BYTES);
    if (p->rows > 32) {
        for (int top = 0; top < p->rows; top += ROWS_OF_PART)
            for (int panel = first_panel; panel < last_panel; panel += PANELS_AT_ONCE)
                multiply_part_by_part(kind, packed, p, top, top + ROWS_OF_PART < p->rows ? top + ROWS_OF_PART : p->rows,
                                      panel, panel + PANELS_AT_ONCE < last_panel ? panel + PANELS_AT_ONCE : last_panel,
                                      sums, room);
        return;
    }
    Ripe ripe = {0};
    for (int panel = first_panel; panel < last_panel; panel++) {
        float(*at)[256] = sums + (panel & 1) * 4; /* the other four are not post-processed yet */
        if (p->rows <= 16)
            few_rows(kind, packed, 1, p, panel, at, room, &ripe);
        else
            few_rows(kind, packed, 2, p, panel, at, room, &ripe);
    }
    finish_rest(kind, p, &ripe);
}

static void multiply_tiles(const Product *p, int first_panel, int last_panel, char *scratch)
{
    shape_tiles(p->rows < 16 ? p->rows : 16);
#define MULTIPLY(kind) multiply_kind(kind, 0, p, first_panel, last_panel, scratch)
#define MULTIPLY_PACKED(kind) multiply_kind(kind, 1, p, first_panel, last_panel, scratch)
    if (p->weight.format->unpack) {
        BY_KIND(p, MULTIPLY_PACKED)
    } else {
        BY_KIND(p, MULTIPLY)
    }
#undef MULTIPLY_PACKED
#undef MULTIPLY
}

/* Products in AMX tiles. Tiles 0…3 hold the sums of 2 × 16 rows and 2 × 16 outputs, 4 and 5 rows of the input, 6 and
 * 7 weights. A row's sums run over the inputs in their order, whatever the number of rows. */

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} __attribute__((packed)) TileShapes;

enum {
    AHEAD = 1024, /* bytes of weights between what is read and what is asked for */
    FAR_AHEAD = 4096, /* where there is more to compute than to wait for: to the second-level cache only */
    DEPTH_AT_ONCE = 8, /* blocks of 32 inputs, about so many that a panel's part of them stays in the nearest cache */
    ROWS_OF_PART = 512,
    PANELS_AT_ONCE = 6 /* so many that their sums and a part of the rows stay in the second-level cache */
};
_Static_assert(ROWS_OF_PART * PANELS_AT_ONCE * PANEL * 4 <= SCRATCH_BYTES, "a thread's scratch is too small");

static void shape_tiles(int rows)
{
    TileShapes shapes = {.palette = 1};
    for (int tile = 0; tile < 8; tile++) {
        shapes.row_bytes[tile] = 64;
        shapes.rows[tile] = tile < 6 ? rows : 16;
    }
    _tile_loadconfig(&shapes);
}

/* Asks for the two tiles of weights that are read a little later. `T`: how many tiles of rows they are for. */
ALWAYS void ask_for(const int T, const bf16 *w)
{
#pragma GCC unroll 32
    for (int line = 0; line < 32; line++) {
        if (T == 2)
            _mm_prefetch((const char *)w + FAR_AHEAD + line * 64, _MM_HINT_T1);
        else
            _mm_prefetch((const char *)w + AHEAD + line * 64, _MM_HINT_T0);
    }
}

/* Sums that are complete. What becomes of them is computed a few rows at a time between the tiles of the products
 * that follow: the vector units have nothing else to do then. */
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

/* Up to 32 rows: the weights are read once, as fast as memory gives them. `T`: how many tiles of rows. */
ALWAYS void few_rows(const int kind, const int T, const Product *p, int panel, float (*sums)[256], Ripe *ripe)
{
    int blocks = p->depth / 32, height = p->rows < 16 ? p->rows : 16, share = (p->rows + blocks - 1) / blocks;
    const bf16 *w = (const bf16 *)p->weight + (long)panel * p->depth * PANEL, *a = p->input;
    const bf16 *a1 = a + 16L * p->depth;
    _tile_zero(0);
    _tile_zero(1);
    if (T == 2) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int block = 0; block < blocks; block++, w += 2 * TILE, a += height * 32, a1 += 16 * 32) {
        ask_for(T, w);
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

/* 32 rows, a part of the inputs: added to `sums`, or the first of them. Meanwhile `lines` cache lines for each block
 * are asked for from `coming` on: the weights that follow these. */
ALWAYS void many_rows(const int kind, const Product *p, const bf16 *a, long next_rows, const bf16 *w, int blocks,
                      int first, float (*sums)[256], const char *coming, int lines, Ripe *ripe)
{
    const bf16 *a1 = a + next_rows;
    int share = 32 / blocks + 1;
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
        for (int line = 0; line < lines; line++, coming += 64) _mm_prefetch(coming, _MM_HINT_T1);
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
    _tile_stored(0, sums[0], 64);
    _tile_stored(1, sums[1], 64);
    _tile_stored(2, sums[2], 64);
    _tile_stored(3, sums[3], 64);
}

/* Some rows, up to PANELS_AT_ONCE panels. A part of the inputs goes through all of them before the next one: rows of
 * the input and weights stay near, at the price of sums that are put down and taken up again. */
ALWAYS void multiply_part_by_part(const int kind, const Product *p, int top, int bottom, int first_panel,
                                  int last_panel, float (*sums)[256])
{
    int blocks = p->depth / 32, parts = (blocks + DEPTH_AT_ONCE / 2) / DEPTH_AT_ONCE;
    /* A panel's part is asked for while the one before is worked on. */
    int lines = (32 * 32 + bottom - top - 1) / (bottom - top);
    long panel_size = (long)p->depth * PANEL;
    Ripe ripe = {0};
    if (parts == 0) parts = 1;
    for (int part = 0; part < parts; part++) {
        int block = blocks * part / parts, end = blocks * (part + 1) / parts;
        float(*at)[256] = sums;
        for (int panel = first_panel; panel < last_panel; panel++) {
            const bf16 *w = (const bf16 *)p->weight + panel * panel_size + block * 2L * TILE;
            const bf16 *next_w = panel + 1 < last_panel ? w + panel_size
                                                        : (const bf16 *)p->weight + first_panel * panel_size +
                                                              end % blocks * 2L * TILE;
            const char *coming = (const char *)next_w;
            for (int row = top; row < bottom; row += 32, at += 4, coming += (end - block) * lines * 64L) {
                const bf16 *a = (const bf16 *)p->input + (long)row * p->depth + block * TILE;
                /* Of the last 32 rows the second half may not be there: then the first is taken twice. */
                long next_rows = row + 16 < p->rows ? 16L * p->depth : 0;
                many_rows(kind, p, a, next_rows, w, end - block, part == 0, at, coming, lines, &ripe);
                if (part < parts - 1) continue;
                finish_rest(kind, p, &ripe);
                int count = bottom - row < 32 ? bottom - row : 32;
                ripe = (Ripe){.sums = at, .panel = panel, .top = row, .count = count};
            }
        }
    }
    finish_rest(kind, p, &ripe);
}

ALWAYS void multiply_kind(const int kind, const Product *p, int first_panel, int last_panel, float (*sums)[256])
{
    if (p->rows > 32) {
        for (int top = 0; top < p->rows; top += ROWS_OF_PART)
            for (int panel = first_panel; panel < last_panel; panel += PANELS_AT_ONCE)
                multiply_part_by_part(kind, p, top, top + ROWS_OF_PART < p->rows ? top + ROWS_OF_PART : p->rows, panel,
                                      panel + PANELS_AT_ONCE < last_panel ? panel + PANELS_AT_ONCE : last_panel, sums);
        return;
    }
    Ripe ripe = {0};
    for (int panel = first_panel; panel < last_panel; panel++) {
        float(*at)[256] = sums + (panel & 1) * 4; /* the other four are still to be finished */
        if (p->rows <= 16)
            few_rows(kind, 1, p, panel, at, &ripe);
        else
            few_rows(kind, 2, p, panel, at, &ripe);
    }
    finish_rest(kind, p, &ripe);
}

static void multiply_tiles(const Product *p, int first_panel, int last_panel, char *scratch)
{
    shape_tiles(p->rows < 16 ? p->rows : 16);
#define MULTIPLY(kind) multiply_kind(kind, p, first_panel, last_panel, (float(*)[256])scratch)
    BY_KIND(p, MULTIPLY)
#undef MULTIPLY
}

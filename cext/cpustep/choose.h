/* Chooses the next token of a row of logits: the highest, or a draw. Included by kernels.h for float32.
 *
 * A score is (logit − highest) / temperature, so at most 0. top_k, top_p and min_p are all thresholds of the
 * score, so that equal scores are kept or dropped together. A draw inverts the cumulative weights in
 * vocabulary order. A row's result depends only on the row. */

enum {
    BINS = 1024,
    FEW = 64 /* scores that are sorted instead */
};

/* Return the logits from index i on, −inf where the row's mask has no bit. `mask` NULL: all are allowed. */
ALWAYS vf NAME(load_allowed)(const float *x, const uint32_t *mask, int i, vi lanes)
{
    vf v = load(x + i);
    if (!mask) return v;
    vi word = (vi){0} + (int32_t)(mask[i / 32] >> i % 32); /* the lanes of a vector share a word */
    return choose(-(word >> lanes & 1), v, splat(-INFINITY));
}

ALWAYS float NAME(one_allowed)(const float *x, const uint32_t *mask, int i)
{
    return !mask || mask[i / 32] >> i % 32 & 1 ? x[i] : -INFINITY;
}

/* Find the highest allowed logit of a row and its first index; NaN counts as highest. */
static void NAME(find_highest)(const float *x, const uint32_t *mask, int count, float *highest, int64_t *place)
{
    vf best = splat(-INFINITY);
    vi where = {0}, index, odd = {0};
    for (int i = 0; i < VW; i++) index[i] = i;
    vi lanes = index;
    int whole = count / VW * VW;
    for (int i = 0; i < whole; i += VW, index += VW) {
        vf v = NAME(load_allowed)(x, mask, i, lanes);
        vi more = v > best;
        best = choose(more, v, best);
        where = (more & index) | (~more & where);
        odd |= v != v;
    }
    float top = -INFINITY;
    int at = 0, broken = 0;
    for (int lane = 0; lane < VW; lane++) {
        broken |= odd[lane];
        if (best[lane] > top || (best[lane] == top && where[lane] < at)) {
            top = best[lane];
            at = where[lane];
        }
    }
    for (int i = whole; i < count; i++) {
        float one = NAME(one_allowed)(x, mask, i);
        broken |= isnan(one);
        if (one > top) {
            top = one;
            at = i;
        }
    }
    if (broken)
        for (at = 0; !isnan(NAME(one_allowed)(x, mask, at));) at++;
    *highest = NAME(one_allowed)(x, mask, at);
    *place = at;
}

/* Compute the scores of a row, padded to whole runs with −inf, and the maximum of each run. */
static void NAME(take_scores)(const float *x, const uint32_t *mask, int count, float top, float temperature,
                              float *scores, float *tops)
{
    vi lanes;
    for (int i = 0; i < VW; i++) lanes[i] = i;
    vf factor = splat(1.0f / temperature), zero = {0};
    int runs = (count + RUN - 1) / RUN;
    for (int i = count / VW * VW; i < runs * RUN; i++) scores[i] = i < count ? NAME(one_allowed)(x, mask, i) : -INFINITY;
    for (int run = 0; run < runs; run++) {
        vf most = splat(-INFINITY);
        for (int i = run * RUN; i < (run + 1) * RUN; i += VW) {
            vf v = i + VW <= count ? NAME(load_allowed)(x, mask, i, lanes) : load(scores + i);
            vf score = lesser(v - top, zero) * factor;
            store(scores + i, score);
            most = greater(most, score);
        }
        tops[run] = highest(most);
    }
}

/* Return the value at `rank`, from 0 on, of the values in descending order (quickselect). Reorders them. */
static float NAME(select)(float *values, int count, int rank)
{
    int low = 0, high = count - 1;
    while (low < high) {
        float pivot = values[low + (high - low) / 2];
        int i = low, j = high;
        while (i <= j) {
            while (values[i] > pivot) i++;
            while (values[j] < pivot) j--;
            if (i > j) break;
            float other = values[i];
            values[i++] = values[j];
            values[j--] = other;
        }
        if (rank <= j)
            high = j;
        else if (rank >= i)
            low = i;
        else
            break;
    }
    return values[rank];
}

/* Return the k-th highest score. If k runs have a maximum of at least x, then at least k scores reach x; so
 * only the runs with the k highest maxima are searched. */
static float NAME(find_kth)(const float *scores, const float *tops, int runs, int k, float *room)
{
    float least = -INFINITY;
    if (k <= runs) {
        memcpy(room, tops, (size_t)runs * sizeof *room);
        least = NAME(select)(room, runs, k - 1);
    }
    int count = 0;
    for (int run = 0; run < runs; run++) {
        if (tops[run] < least) continue;
        for (int i = run * RUN; i < (run + 1) * RUN; i++) {
            room[count] = scores[i];
            count += scores[i] >= least;
        }
    }
    return NAME(select)(room, count, k - 1);
}

ALWAYS vf NAME(weight)(vf scores, vf least) { return choose(scores >= least, power_of_two(scores * LOG2_E), (vf){0}); }

/* Compute the weight of each run, counting scores of at least `least`; return their sum. */
static double NAME(sum_runs)(const float *scores, const float *tops, int runs, float least, double *sums)
{
    double whole = 0;
    for (int run = 0; run < runs; run++) {
        vf sum = {0};
        if (tops[run] >= least)
            for (int i = run * RUN; i < (run + 1) * RUN; i += VW) sum += NAME(weight)(load(scores + i), splat(least));
        whole += sums[run] = total(sum);
    }
    return whole;
}

static int NAME(compare_descending)(const void *a, const void *b)
{
    float x = *(const float *)a, y = *(const float *)b;
    return (x < y) - (x > y);
}

/* Return the highest score such that the scores that reach it weigh `wanted` of `whole` together; `least` if
 * there is none. Weights are summed in bins; the bin with the threshold is split until few scores remain. */
static float NAME(find_nucleus)(const float *scores, const float *tops, int runs, float least, double wanted,
                                double whole, float *room)
{
    double before = 0, weights[BINS], parts[4][BINS]; /* parts: for independent additions */
    /* All scores below this one weigh less than whole − wanted, so the threshold is not among them. */
    float top = 0, low = logf((float)((whole - wanted) / ((double)runs * RUN))) - 0.01f;
    if (!(low > -87.0f)) low = -87.0f; /* lower scores have weight 0 */
    if (low < least) low = least;
    int left = 0;
    for (int run = 0; run < runs; run++) {
        if (tops[run] < low) continue;
        for (int i = run * RUN; i < (run + 1) * RUN; i++) {
            room[left] = scores[i];
            left += scores[i] >= low;
        }
    }
    while (left > FEW && top - low > 1e-30f) {
        float scale = (BINS - 1) / (top - low);
        memset(parts, 0, sizeof parts);
        for (int i = 0; i < left; i += VW) {
            vf score = load(room + i);
            float weight[VW];
            int32_t bin[VW];
            vi bins = __builtin_convertvector((top - score) * scale, vi);
            store(weight, power_of_two(score * LOG2_E));
            memcpy(bin, &bins, sizeof bin);
            int lanes = left - i < VW ? left - i : VW;
            for (int lane = 0; lane < lanes; lane++) parts[lane % 4][bin[lane]] += weight[lane];
        }
        for (int bin = 0; bin < BINS; bin++)
            weights[bin] = parts[0][bin] + parts[1][bin] + parts[2][bin] + parts[3][bin];
        int chosen = 0, last = 0;
        double sum = before;
        for (; chosen < BINS && sum + weights[chosen] < wanted; chosen++) {
            if (weights[chosen] > 0) last = chosen;
            sum += weights[chosen];
        }
        if (chosen == BINS) { /* rounding left the sum of all below `wanted` */
            chosen = last;
            sum = wanted;
        }
        before = sum;
        float highest = -INFINITY, lowest = INFINITY;
        int kept = 0;
        for (int i = 0; i < left; i++) {
            float score = room[i];
            room[kept] = score;
            kept += (int)((top - score) * scale) == chosen;
        }
        left = kept;
        for (int i = 0; i < left; i++) {
            highest = room[i] > highest ? room[i] : highest;
            lowest = room[i] < lowest ? room[i] : lowest;
        }
        top = highest;
        low = lowest;
    }
    if (left > FEW) return low; /* all of them are equal */
    qsort(room, (size_t)left, sizeof *room, NAME(compare_descending));
    int chosen = 0;
    for (; chosen < left - 1; chosen++)
        if ((before += power_of_two(splat(room[chosen] * LOG2_E))[0]) >= wanted) break;
    return left ? room[chosen] : least;
}

/* Return the index where the cumulative weight exceeds `number` · `whole`; its own weight is never 0. */
static int NAME(pass)(const float *scores, int runs, float least, const double *sums, double whole, double number)
{
    double target = whole * number;
    int run = 0, last = 0;
    for (; run < runs; run++) {
        if (sums[run] > 0) last = run;
        if (sums[run] > target) break;
        target -= sums[run];
    }
    if (run == runs) { /* rounding may raise a target to the whole */
        run = last;
        target = INFINITY;
    }
    int found = run * RUN;
    for (int i = run * RUN; i < (run + 1) * RUN; i += VW) {
        vf weights = NAME(weight)(load(scores + i), splat(least));
        for (int lane = 0; lane < VW; lane++) {
            if (!(weights[lane] > 0)) continue;
            found = i + lane;
            if (weights[lane] > target) return found;
            target -= weights[lane];
        }
    }
    return found;
}

static void NAME(choose_row)(const Choice *choice, int row, char *scratch)
{
    const float *x = choice->logits + row * choice->stride;
    int count = choice->vocabulary, runs = (count + RUN - 1) / RUN;
    const uint32_t *mask = NULL;
    if (choice->masks && choice->mask_rows[row] >= 0)
        mask = choice->masks + (long)choice->mask_rows[row] * ((count + 31) / 32);
    NAME(find_highest)(x, mask, count, &choice->highest[row], &choice->tokens[row]);
    float highest = choice->highest[row], temperature = choice->temperatures[row];
    if (!(temperature >= choice->greedy_below) || !(highest > -INFINITY)) return;
    if (temperature > 1e30f) temperature = 1e30f; /* a larger one would turn −inf into NaN */
    float *scores = (float *)scratch, *room = scores + (long)runs * RUN, *tops = room + (long)runs * RUN;
    double *sums = (double *)(tops + (runs + 1) / 2 * 2);
    NAME(take_scores)(x, mask, count, highest < FLT_MAX ? highest : FLT_MAX, temperature, scores, tops);
    float least = choice->least[row] > -INFINITY ? choice->least[row] : -INFINITY; /* NaN becomes −inf */
    if (choice->top_k[row] > 0 && choice->top_k[row] < count) {
        float kth = NAME(find_kth)(scores, tops, runs, choice->top_k[row], room);
        if (kth > least) least = kth;
    }
    double whole = NAME(sum_runs)(scores, tops, runs, least, sums);
    if (choice->top_p[row] < 1) {
        double wanted = choice->top_p[row] > 0 ? whole * choice->top_p[row] : 0;
        float nucleus = NAME(find_nucleus)(scores, tops, runs, least, wanted, whole, room);
        if (nucleus > least) {
            least = nucleus;
            whole = NAME(sum_runs)(scores, tops, runs, least, sums);
        }
    }
    choice->tokens[row] = NAME(pass)(scores, runs, least, sums, whole, choice->numbers[row]);
}

"""The Triton kernels of `ssd_triton.py`, which launches them; `ssd.py` says what they compute.

Matrix products take their operands in the format of x and add up in fp32; decays, sums and the state that is carried on
are fp32. Sequence lengths, chunks and widths may be anything; tiles are masked. Everything steps over its axes by the
strides given, but the last axis must be dense. Tensor names end in their shape, as in `ssd.py`: L and M are both tokens
of a chunk.
"""

import triton
import triton.language as tl


@triton.jit
def _load(base, rows, row_stride, columns, rows_ok, columns_ok):
    places = base + rows[:, None] * row_stride + columns[None, :]
    return tl.load(places, mask=rows_ok[:, None] & columns_ok[None, :], other=0.0)


@triton.jit
def _load_turned(base, rows, columns, column_stride, rows_ok, columns_ok):
    """As `_load` with rows side by side in memory: the transpose of what lies there."""
    places = base + rows[:, None] + columns[None, :] * column_stride
    return tl.load(places, mask=rows_ok[:, None] & columns_ok[None, :], other=0.0)


@triton.jit
def _fade(s_l, s_m, rows_l, rows_m, CHUNK: tl.constexpr):
    """exp(s[l] - s[m]) where l is not before m, else 0. Outside the chunk s is 0, whose exponential could overflow."""
    reached = (rows_l[:, None] >= rows_m[None, :]) & (rows_l < CHUNK)[:, None]
    return tl.exp(tl.where(reached, s_l[:, None] - s_m[None, :], float("-inf")))


@triton.jit
def scores_kernel(
    c, b, scores, c_batch, c_token, c_group, b_batch, b_token, b_group, tokens, chunks,
    CHUNK: tl.constexpr, STATE: tl.constexpr, TILE: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    """scores[l, m] = c[l] . b[m], of one tile on or below the diagonal of one chunk and group."""
    tiles: tl.constexpr = (CHUNK + TILE - 1) // TILE
    tile_l, tile_m = tl.program_id(2) // tiles, tl.program_id(2) % tiles
    if tile_m > tile_l:
        return
    which, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    batch, first = which // chunks, which % chunks * CHUNK
    rows_l = tile_l * TILE + tl.arange(0, TILE)
    rows_m = tile_m * TILE + tl.arange(0, TILE)
    ok_l, ok_m = (rows_l < CHUNK) & (first + rows_l < tokens), (rows_m < CHUNK) & (first + rows_m < tokens)
    c += batch * c_batch + first * c_token + group * c_group
    b += batch * b_batch + first * b_token + group * b_group
    total = tl.zeros((TILE, TILE), tl.float32)
    for start in range(0, STATE, TILE_N):
        n = start + tl.arange(0, TILE_N)
        c_LN = _load(c, rows_l, c_token, n, ok_l, n < STATE)
        b_NM = _load_turned(b, n, rows_m, b_token, n < STATE, ok_m)
        total = tl.dot(c_LN, b_NM, total, input_precision="ieee")
    scores += (which * tl.num_programs(1) + group) * CHUNK * CHUNK
    inside = (rows_l < CHUNK)[:, None] & (rows_m < CHUNK)[None, :]
    tl.store(scores + rows_l[:, None] * CHUNK + rows_m[None, :], total, mask=inside)


@triton.jit
def states_kernel(
    v, weights, k, decays, given, entering, states, left, through,
    v_batch, v_token, v_head, k_batch, k_token, k_group, tokens, chunks, heads,
    BACKWARD: tl.constexpr, SHARE: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr, STATE: tl.constexpr,
    TILE: tl.constexpr, TILE_P: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    """The state that enters each chunk, of one head and some columns: what the chunks before it add, each faded since.

    A chunk adds the sum over its tokens of weights * v[p] * k[n]. The state is carried in registers from chunk to chunk
    and only ever written, in the format of what it is multiplied with. The first chunk may be entered by a given
    state; then what leaves the last one is kept too.
    Backward, chunks gather from the last to the first, which gives the slope of the state that leaves each of them;
    `through` receives how much of that is read from the state that entered the chunk.
    """
    which, tile_n = tl.program_id(0).to(tl.int64), tl.program_id(1)
    batch, head = which // heads, which % heads
    p, n = tl.arange(0, TILE_P), tile_n * TILE_N + tl.arange(0, TILE_N)
    place, inside = p[:, None] * STATE + n[None, :], (p < WIDTH)[:, None] & (n < STATE)[None, :]
    TILES: tl.constexpr = (CHUNK + TILE - 1) // TILE
    v += batch * v_batch + head * v_head
    k += batch * k_batch + head // SHARE * k_group
    carried = tl.zeros((TILE_P, TILE_N), tl.float32)
    if given is not None:
        carried += tl.load(given + which * WIDTH * STATE + place, mask=inside, other=0.0)
    own = tl.zeros((TILE_P, TILE_N), tl.float32)
    for step in range(chunks * TILES):  # one loop, of which the compiler loads the next tiles ahead
        chunk = chunks - 1 - step // TILES if BACKWARD else step // TILES
        first = tl.cast(chunk, tl.int64) * CHUNK
        line = (which * chunks + chunk) * CHUNK
        rows = step % TILES * TILE + tl.arange(0, TILE)
        ok = (rows < CHUNK) & (first + rows < tokens)
        weight_L = tl.load(weights + line + rows, mask=ok, other=0.0)
        v_PL = _load_turned(v + first * v_token, p, rows, v_token, p < WIDTH, ok) * weight_L[None, :]
        k_LN = _load(k + first * k_token, rows, k_token, n, ok, n < STATE)
        own = tl.dot(v_PL.to(k_LN.dtype), k_LN, own, input_precision="ieee")
        if step % TILES == TILES - 1:
            here = ((batch * chunks + chunk) * heads + head) * WIDTH * STATE + place
            tl.store(states + here, carried.to(states.dtype.element_ty), mask=inside)
            carried *= tl.load(decays + which * chunks + chunk)
            if BACKWARD:
                entered = tl.load(entering + here, mask=inside, other=0.0)
                part = tile_n * tl.num_programs(0) * chunks
                tl.store(through + part + which * chunks + chunk, tl.sum(carried * entered))
            carried += own
            own = tl.zeros((TILE_P, TILE_N), tl.float32)
    if given is not None:
        tl.store(left + which * WIDTH * STATE + place, carried, mask=inside)


@triton.jit
def scan_kernel(
    x, c, scores, states, dt, s, d, y, x_batch, x_token, x_head, c_batch, c_token, c_group, tokens, chunks,
    SHARE: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr, STATE: tl.constexpr,
    TILE: tl.constexpr, TILE_P: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    """y of one tile of tokens and one head: from the state that entered the chunk, the chunk itself, the skip."""
    which, head, heads = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    batch, chunk = which // chunks, which % chunks
    first = chunk * CHUNK
    rows_l, p = tl.program_id(2) * TILE + tl.arange(0, TILE), tl.arange(0, TILE_P)
    ok_l = (rows_l < CHUNK) & (first + rows_l < tokens)
    x += batch * x_batch + first * x_token + head * x_head
    c += batch * c_batch + first * c_token + head // SHARE * c_group
    states += (which * heads + head) * WIDTH * STATE
    scores += (which * (heads // SHARE) + head // SHARE) * CHUNK * CHUNK
    dt += ((batch * heads + head) * chunks + chunk) * CHUNK
    s += ((batch * heads + head) * chunks + chunk) * CHUNK
    s_L = tl.load(s + rows_l, mask=rows_l < CHUNK, other=0.0)

    total = tl.zeros((TILE, TILE_P), tl.float32)
    for start in range(0, STATE, TILE_N):
        n = start + tl.arange(0, TILE_N)
        c_LN = _load(c, rows_l, c_token, n, ok_l, n < STATE)
        state_NP = _load_turned(states, n, p, STATE, n < STATE, p < WIDTH)
        total = tl.dot(c_LN, state_NP, total, input_precision="ieee")
    total *= tl.exp(s_L)[:, None]
    for start in range(0, (tl.program_id(2) + 1) * TILE, TILE):
        rows_m = start + tl.arange(0, TILE)
        in_m = rows_m < CHUNK
        s_M, dt_M = tl.load(s + rows_m, mask=in_m, other=0.0), tl.load(dt + rows_m, mask=in_m, other=0.0)
        score_LM = _load(scores, rows_l, CHUNK, rows_m, rows_l < CHUNK, in_m)
        weight_LM = score_LM * _fade(s_L, s_M, rows_l, rows_m, CHUNK) * dt_M[None, :]
        x_MP = _load(x, rows_m, x_token, p, in_m & (first + rows_m < tokens), p < WIDTH)
        total = tl.dot(weight_LM.to(x_MP.dtype), x_MP, total, input_precision="ieee")
    total += tl.load(d + head) * _load(x, rows_l, x_token, p, ok_l, p < WIDTH)
    y += ((batch * tokens + first) * heads + head) * WIDTH
    tl.store(
        y + rows_l[:, None] * heads * WIDTH + p[None, :],
        total.to(y.dtype.element_ty),
        mask=ok_l[:, None] & (p < WIDTH)[None, :],
    )


@triton.jit
def score_slopes_kernel(
    dy, x, scores, dt, s, slopes, read, given, y_batch, y_token, y_head, x_batch, x_token, x_head,
    tokens, chunks, heads,
    SHARE: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, TILE_P: tl.constexpr,
):  # fmt: skip
    """Slopes of the scores, summed over the heads of a group; how much each token reads from others of its chunk, and
    how much it is read by them."""
    tiles: tl.constexpr = (CHUNK + TILE - 1) // TILE
    tile_l, tile_m = tl.program_id(2) // tiles, tl.program_id(2) % tiles
    if tile_m > tile_l:
        return
    which, group, groups = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    batch, chunk = which // chunks, which % chunks
    first = chunk * CHUNK
    rows_l, rows_m = tile_l * TILE + tl.arange(0, TILE), tile_m * TILE + tl.arange(0, TILE)
    p = tl.arange(0, TILE_P)
    in_l, in_m = rows_l < CHUNK, rows_m < CHUNK
    ok_l, ok_m = in_l & (first + rows_l < tokens), in_m & (first + rows_m < tokens)
    square = (which * groups + group) * CHUNK * CHUNK
    score_LM = _load(scores + square, rows_l, CHUNK, rows_m, in_l, in_m)
    total = tl.zeros((TILE, TILE), tl.float32)
    for member in range(SHARE):
        head = group * SHARE + member
        line = ((batch * heads + head) * chunks + chunk) * CHUNK
        s_L, s_M = tl.load(s + line + rows_l, mask=in_l, other=0.0), tl.load(s + line + rows_m, mask=in_m, other=0.0)
        dt_M = tl.load(dt + line + rows_m, mask=in_m, other=0.0)
        dy_LP = _load(dy + batch * y_batch + first * y_token + head * y_head, rows_l, y_token, p, ok_l, p < WIDTH)
        x_PM = _load_turned(x + batch * x_batch + first * x_token + head * x_head, p, rows_m, x_token, p < WIDTH, ok_m)
        slope_LM = tl.dot(dy_LP, x_PM, input_precision="ieee") * _fade(s_L, s_M, rows_l, rows_m, CHUNK) * dt_M[None, :]
        total += slope_LM
        between_LM = tl.where(rows_l[:, None] > rows_m[None, :], slope_LM * score_LM, 0.0)
        all_lines = tl.num_programs(0) * heads * CHUNK
        tl.store(read + tile_m * all_lines + line + rows_l, tl.sum(between_LM, axis=1), mask=in_l)
        tl.store(given + tile_l * all_lines + line + rows_m, tl.sum(between_LM, axis=0), mask=in_m)
    tl.store(slopes + square + rows_l[:, None] * CHUNK + rows_m[None, :], total, mask=in_l[:, None] & in_m[None, :])


@triton.jit
def input_slopes_kernel(
    dy, x, b, scores, dstates, dt, s, d, dx, ddt, dd, y_batch, y_token, y_head, x_batch, x_token, x_head,
    b_batch, b_token, b_group, tokens, chunks,
    SHARE: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr, STATE: tl.constexpr,
    TILE: tl.constexpr, TILE_P: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    """Slopes of x of one tile and head, and each token's share of those of dt (where it scales x) and of d."""
    which, head, heads = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    batch, chunk = which // chunks, which % chunks
    first = chunk * CHUNK
    rows_m, p = tl.program_id(2) * TILE + tl.arange(0, TILE), tl.arange(0, TILE_P)
    in_m = rows_m < CHUNK
    ok_m = in_m & (first + rows_m < tokens)
    dy += batch * y_batch + first * y_token + head * y_head
    x += batch * x_batch + first * x_token + head * x_head
    b += batch * b_batch + first * b_token + head // SHARE * b_group
    dstates += (which * heads + head) * WIDTH * STATE
    scores += (which * (heads // SHARE) + head // SHARE) * CHUNK * CHUNK
    line = ((batch * heads + head) * chunks + chunk) * CHUNK
    s_M = tl.load(s + line + rows_m, mask=in_m, other=0.0)

    total = tl.zeros((TILE, TILE_P), tl.float32)  # slopes of dt * x
    for start in range(0, STATE, TILE_N):
        n = start + tl.arange(0, TILE_N)
        b_MN = _load(b, rows_m, b_token, n, ok_m, n < STATE)
        dstate_NP = _load_turned(dstates, n, p, STATE, n < STATE, p < WIDTH)
        total = tl.dot(b_MN, dstate_NP, total, input_precision="ieee")
    total *= tl.where(in_m, tl.exp(tl.load(s + line + CHUNK - 1) - s_M), 0.0)[:, None]
    for start in range(tl.program_id(2) * TILE, CHUNK, TILE):
        rows_l = start + tl.arange(0, TILE)
        in_l = rows_l < CHUNK
        s_L = tl.load(s + line + rows_l, mask=in_l, other=0.0)
        score_LM = _load(scores, rows_l, CHUNK, rows_m, in_l, in_m)
        weight_LM = score_LM * _fade(s_L, s_M, rows_l, rows_m, CHUNK)
        dy_LP = _load(dy, rows_l, y_token, p, in_l & (first + rows_l < tokens), p < WIDTH)
        total = tl.dot(tl.trans(weight_LM).to(dy_LP.dtype), dy_LP, total, input_precision="ieee")
    x_MP = _load(x, rows_m, x_token, p, ok_m, p < WIDTH).to(tl.float32)
    dy_MP = _load(dy, rows_m, y_token, p, ok_m, p < WIDTH).to(tl.float32)
    dt_M = tl.load(dt + line + rows_m, mask=in_m, other=0.0)
    tl.store(ddt + line + rows_m, tl.sum(x_MP * total, axis=1), mask=in_m)
    tl.store(dd + line + rows_m, tl.sum(x_MP * dy_MP, axis=1), mask=in_m)
    total = total * dt_M[:, None] + tl.load(d + head) * dy_MP
    dx += ((batch * tokens + first) * heads + head) * WIDTH
    tl.store(
        dx + rows_m[:, None] * heads * WIDTH + p[None, :],
        total.to(dx.dtype.element_ty),
        mask=ok_m[:, None] & (p < WIDTH)[None, :],
    )


@triton.jit
def key_slopes_kernel(
    v, weights, states, slopes, own, other, out, read, v_batch, v_token, v_head, own_batch, own_token, own_group,
    other_batch, other_token, other_group, tokens, chunks, heads,
    TURNED: tl.constexpr, SHARE: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr, STATE: tl.constexpr,
    TILE: tl.constexpr, TILE_P: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    """Slopes of c, or of b when turned, summed over a group: through the states and through the scores.

    Also how much each token reads from the state that entered its chunk or, when turned, is read from the one that
    leaves it: its own c or b times the first part.
    """
    tiles_n: tl.constexpr = (STATE + TILE_N - 1) // TILE_N
    tile_l, tile_n = tl.program_id(2) // tiles_n, tl.program_id(2) % tiles_n
    which, group, groups = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    batch, chunk = which // chunks, which % chunks
    first = chunk * CHUNK
    rows_l, p, n = tile_l * TILE + tl.arange(0, TILE), tl.arange(0, TILE_P), tile_n * TILE_N + tl.arange(0, TILE_N)
    in_l = rows_l < CHUNK
    ok_l = in_l & (first + rows_l < tokens)
    own += batch * own_batch + first * own_token + group * own_group
    other += batch * other_batch + first * other_token + group * other_group
    slopes += (which * groups + group) * CHUNK * CHUNK
    own_LN = _load(own, rows_l, own_token, n, ok_l, n < STATE)
    total = tl.zeros((TILE, TILE_N), tl.float32)
    for member in range(SHARE):
        head = group * SHARE + member
        line = ((batch * heads + head) * chunks + chunk) * CHUNK
        weight_L = tl.load(weights + line + rows_l, mask=in_l, other=0.0)
        v_LP = _load(v + batch * v_batch + first * v_token + head * v_head, rows_l, v_token, p, ok_l, p < WIDTH)
        state = states + (which * heads + head) * WIDTH * STATE
        state_PN = _load(state, p, STATE, n, p < WIDTH, n < STATE)
        part_LN = tl.dot(v_LP, state_PN, input_precision="ieee") * weight_L[:, None]
        total += part_LN
        part = tile_n * tl.num_programs(0) * heads * CHUNK
        tl.store(read + part + line + rows_l, tl.sum(part_LN * own_LN, axis=1), mask=in_l)
    begin = tile_l * TILE if TURNED else 0
    end = CHUNK if TURNED else (tile_l + 1) * TILE
    for start in range(begin, end, TILE):
        rows_m = start + tl.arange(0, TILE)
        in_m = rows_m < CHUNK
        if TURNED:
            slope_LM = _load_turned(slopes, rows_l, rows_m, CHUNK, in_l, in_m)
        else:
            slope_LM = _load(slopes, rows_l, CHUNK, rows_m, in_l, in_m)
        other_MN = _load(other, rows_m, other_token, n, in_m & (first + rows_m < tokens), n < STATE)
        total = tl.dot(slope_LM.to(other_MN.dtype), other_MN, total, input_precision="ieee")
    out += ((batch * tokens + first) * groups + group) * STATE
    tl.store(
        out + rows_l[:, None] * groups * STATE + n[None, :],
        total.to(out.dtype.element_ty),
        mask=ok_l[:, None] & (n < STATE)[None, :],
    )

"""Triton kernels of the SSD scan, launched by `ssd_triton.py`; `ssd.py` defines what they compute.

Matmuls take operands in the dtype of x and accumulate in fp32; decays, sums and the state passed between chunks are
fp32. Sequence length, chunk and head dim are arbitrary; blocks are masked. Tensors have arbitrary strides, but the last
axis must be contiguous. Tensor names end in their shape, as in `ssd.py`: L and M are both tokens of a chunk.
"""

import triton
import triton.language as tl


@triton.jit
def _load(base, rows, row_stride, columns, row_mask, column_mask):
    ptrs = base + rows[:, None] * row_stride + columns[None, :]
    return tl.load(ptrs, mask=row_mask[:, None] & column_mask[None, :], other=0.0)


@triton.jit
def _load_transposed(base, rows, columns, column_stride, row_mask, column_mask):
    """Like `_load`, of the transpose of what is in memory."""
    ptrs = base + rows[:, None] + columns[None, :] * column_stride
    return tl.load(ptrs, mask=row_mask[:, None] & column_mask[None, :], other=0.0)


@triton.jit
def _decay_matrix(da_l, da_m, rows_l, rows_m, CHUNK: tl.constexpr):
    """exp(da[l] - da[m]) for l >= m, else 0. Outside the chunk da is 0, whose exponential could overflow."""
    causal = (rows_l[:, None] >= rows_m[None, :]) & (rows_l < CHUNK)[:, None]
    return tl.exp(tl.where(causal, da_l[:, None] - da_m[None, :], float("-inf")))


@triton.jit
def scores_kernel(
    c, b, scores, c_batch, c_token, c_group, b_batch, b_token, b_group, tokens, chunks,
    CHUNK: tl.constexpr, STATE: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """scores[l, m] = c[l] . b[m], of one block on or below the diagonal of one chunk and group."""
    blocks: tl.constexpr = (CHUNK + BLOCK_L - 1) // BLOCK_L
    pid_l, pid_m = tl.program_id(2) // blocks, tl.program_id(2) % blocks
    if pid_m > pid_l:
        return
    batch_chunk, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    batch, first = batch_chunk // chunks, batch_chunk % chunks * CHUNK
    rows_l = pid_l * BLOCK_L + tl.arange(0, BLOCK_L)
    rows_m = pid_m * BLOCK_L + tl.arange(0, BLOCK_L)
    valid_l, valid_m = (rows_l < CHUNK) & (first + rows_l < tokens), (rows_m < CHUNK) & (first + rows_m < tokens)
    c += batch * c_batch + first * c_token + group * c_group
    b += batch * b_batch + first * b_token + group * b_group
    acc = tl.zeros((BLOCK_L, BLOCK_L), tl.float32)
    for start in range(0, STATE, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        c_LN = _load(c, rows_l, c_token, n, valid_l, n < STATE)
        b_NM = _load_transposed(b, n, rows_m, b_token, n < STATE, valid_m)
        acc = tl.dot(c_LN, b_NM, acc, input_precision="ieee")
    scores += (batch_chunk * tl.num_programs(1) + group) * CHUNK * CHUNK
    mask = (rows_l < CHUNK)[:, None] & (rows_m < CHUNK)[None, :]
    tl.store(scores + rows_l[:, None] * CHUNK + rows_m[None, :], acc, mask=mask)


@triton.jit
def states_kernel(
    v, weights, k, decays, initial_states, entering, states, final_states, dlog_states,
    v_batch, v_token, v_head, k_batch, k_token, k_group, tokens, chunks, heads,
    BACKWARD: tl.constexpr, GROUP_HEADS: tl.constexpr, CHUNK: tl.constexpr, HEAD_DIM: tl.constexpr, STATE: tl.constexpr,
    BLOCK_L: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Pass the state from chunk to chunk, of one head and some columns, and store the state before each chunk.

    A chunk adds the sum over its tokens of weights * v[p] * k[n]. The state stays in registers and is only written, in
    the dtype of the operand it becomes. With initial states the final states are stored too.
    Backward, chunks go from the last to the first, which gives the gradient of the state after each of them;
    `dlog_states` receives its product with the state before the chunk.
    """
    batch_head, pid_n = tl.program_id(0).to(tl.int64), tl.program_id(1)
    batch, head = batch_head // heads, batch_head % heads
    p, n = tl.arange(0, BLOCK_P), pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offsets, mask = p[:, None] * STATE + n[None, :], (p < HEAD_DIM)[:, None] & (n < STATE)[None, :]
    BLOCKS: tl.constexpr = (CHUNK + BLOCK_L - 1) // BLOCK_L
    v += batch * v_batch + head * v_head
    k += batch * k_batch + head // GROUP_HEADS * k_group
    acc = tl.zeros((BLOCK_P, BLOCK_N), tl.float32)
    if initial_states is not None:
        acc += tl.load(initial_states + batch_head * HEAD_DIM * STATE + offsets, mask=mask, other=0.0)
    chunk_acc = tl.zeros((BLOCK_P, BLOCK_N), tl.float32)
    for step in range(chunks * BLOCKS):  # a single loop, so that the compiler can prefetch the next blocks
        chunk = chunks - 1 - step // BLOCKS if BACKWARD else step // BLOCKS
        first = tl.cast(chunk, tl.int64) * CHUNK
        token_offset = (batch_head * chunks + chunk) * CHUNK
        rows = step % BLOCKS * BLOCK_L + tl.arange(0, BLOCK_L)
        valid = (rows < CHUNK) & (first + rows < tokens)
        weight_L = tl.load(weights + token_offset + rows, mask=valid, other=0.0)
        v_PL = _load_transposed(v + first * v_token, p, rows, v_token, p < HEAD_DIM, valid) * weight_L[None, :]
        k_LN = _load(k + first * k_token, rows, k_token, n, valid, n < STATE)
        chunk_acc = tl.dot(v_PL.to(k_LN.dtype), k_LN, chunk_acc, input_precision="ieee")
        if step % BLOCKS == BLOCKS - 1:
            state_offsets = ((batch * chunks + chunk) * heads + head) * HEAD_DIM * STATE + offsets
            tl.store(states + state_offsets, acc.to(states.dtype.element_ty), mask=mask)
            acc *= tl.load(decays + batch_head * chunks + chunk)
            if BACKWARD:
                entering_PN = tl.load(entering + state_offsets, mask=mask, other=0.0)
                partial = pid_n * tl.num_programs(0) * chunks
                tl.store(dlog_states + partial + batch_head * chunks + chunk, tl.sum(acc * entering_PN))
            acc += chunk_acc
            chunk_acc = tl.zeros((BLOCK_P, BLOCK_N), tl.float32)
    if initial_states is not None:
        tl.store(final_states + batch_head * HEAD_DIM * STATE + offsets, acc, mask=mask)


@triton.jit
def scan_kernel(
    x, c, scores, states, dt, da_cumsum, d, y, x_batch, x_token, x_head, c_batch, c_token, c_group, tokens, chunks,
    GROUP_HEADS: tl.constexpr, CHUNK: tl.constexpr, HEAD_DIM: tl.constexpr, STATE: tl.constexpr,
    BLOCK_L: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute y of one block of tokens and one head: from the state before the chunk, the chunk itself, the skip."""
    batch_chunk, head, heads = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    batch, chunk = batch_chunk // chunks, batch_chunk % chunks
    first = chunk * CHUNK
    rows_l, p = tl.program_id(2) * BLOCK_L + tl.arange(0, BLOCK_L), tl.arange(0, BLOCK_P)
    valid_l = (rows_l < CHUNK) & (first + rows_l < tokens)
    x += batch * x_batch + first * x_token + head * x_head
    c += batch * c_batch + first * c_token + head // GROUP_HEADS * c_group
    states += (batch_chunk * heads + head) * HEAD_DIM * STATE
    scores += (batch_chunk * (heads // GROUP_HEADS) + head // GROUP_HEADS) * CHUNK * CHUNK
    dt += ((batch * heads + head) * chunks + chunk) * CHUNK
    da_cumsum += ((batch * heads + head) * chunks + chunk) * CHUNK
    da_L = tl.load(da_cumsum + rows_l, mask=rows_l < CHUNK, other=0.0)

    acc = tl.zeros((BLOCK_L, BLOCK_P), tl.float32)
    for start in range(0, STATE, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        c_LN = _load(c, rows_l, c_token, n, valid_l, n < STATE)
        state_NP = _load_transposed(states, n, p, STATE, n < STATE, p < HEAD_DIM)
        acc = tl.dot(c_LN, state_NP, acc, input_precision="ieee")
    acc *= tl.exp(da_L)[:, None]
    for start in range(0, (tl.program_id(2) + 1) * BLOCK_L, BLOCK_L):
        rows_m = start + tl.arange(0, BLOCK_L)
        mask_m = rows_m < CHUNK
        da_M, dt_M = tl.load(da_cumsum + rows_m, mask=mask_m, other=0.0), tl.load(dt + rows_m, mask=mask_m, other=0.0)
        score_LM = _load(scores, rows_l, CHUNK, rows_m, rows_l < CHUNK, mask_m)
        weight_LM = score_LM * _decay_matrix(da_L, da_M, rows_l, rows_m, CHUNK) * dt_M[None, :]
        x_MP = _load(x, rows_m, x_token, p, mask_m & (first + rows_m < tokens), p < HEAD_DIM)
        acc = tl.dot(weight_LM.to(x_MP.dtype), x_MP, acc, input_precision="ieee")
    acc += tl.load(d + head) * _load(x, rows_l, x_token, p, valid_l, p < HEAD_DIM)
    y += ((batch * tokens + first) * heads + head) * HEAD_DIM
    tl.store(
        y + rows_l[:, None] * heads * HEAD_DIM + p[None, :],
        acc.to(y.dtype.element_ty),
        mask=valid_l[:, None] & (p < HEAD_DIM)[None, :],
    )


@triton.jit
def score_grads_kernel(
    dy, x, scores, dt, da_cumsum, dscores, row_sums, column_sums, y_batch, y_token, y_head, x_batch, x_token, x_head,
    tokens, chunks, heads,
    GROUP_HEADS: tl.constexpr, CHUNK: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_L: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Compute gradients of the scores, summed over the heads of a group, and sums over the rows and columns of
    gradient * score, which the gradient of the decays needs."""
    blocks: tl.constexpr = (CHUNK + BLOCK_L - 1) // BLOCK_L
    pid_l, pid_m = tl.program_id(2) // blocks, tl.program_id(2) % blocks
    if pid_m > pid_l:
        return
    batch_chunk, group, groups = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    batch, chunk = batch_chunk // chunks, batch_chunk % chunks
    first = chunk * CHUNK
    rows_l, rows_m = pid_l * BLOCK_L + tl.arange(0, BLOCK_L), pid_m * BLOCK_L + tl.arange(0, BLOCK_L)
    p = tl.arange(0, BLOCK_P)
    mask_l, mask_m = rows_l < CHUNK, rows_m < CHUNK
    valid_l, valid_m = mask_l & (first + rows_l < tokens), mask_m & (first + rows_m < tokens)
    score_offset = (batch_chunk * groups + group) * CHUNK * CHUNK
    score_LM = _load(scores + score_offset, rows_l, CHUNK, rows_m, mask_l, mask_m)
    acc = tl.zeros((BLOCK_L, BLOCK_L), tl.float32)
    for member in range(GROUP_HEADS):
        head = group * GROUP_HEADS + member
        token_offset = ((batch * heads + head) * chunks + chunk) * CHUNK
        da_L = tl.load(da_cumsum + token_offset + rows_l, mask=mask_l, other=0.0)
        da_M = tl.load(da_cumsum + token_offset + rows_m, mask=mask_m, other=0.0)
        dt_M = tl.load(dt + token_offset + rows_m, mask=mask_m, other=0.0)
        dy_LP = _load(dy + batch * y_batch + first * y_token + head * y_head, rows_l, y_token, p, valid_l, p < HEAD_DIM)
        x_head_ptr = x + batch * x_batch + first * x_token + head * x_head
        x_PM = _load_transposed(x_head_ptr, p, rows_m, x_token, p < HEAD_DIM, valid_m)
        decay_LM = _decay_matrix(da_L, da_M, rows_l, rows_m, CHUNK)
        dscore_LM = tl.dot(dy_LP, x_PM, input_precision="ieee") * decay_LM * dt_M[None, :]
        acc += dscore_LM
        product_LM = tl.where(rows_l[:, None] > rows_m[None, :], dscore_LM * score_LM, 0.0)
        partial = tl.num_programs(0) * heads * CHUNK
        tl.store(row_sums + pid_m * partial + token_offset + rows_l, tl.sum(product_LM, axis=1), mask=mask_l)
        tl.store(column_sums + pid_l * partial + token_offset + rows_m, tl.sum(product_LM, axis=0), mask=mask_m)
    dscore_ptrs = dscores + score_offset + rows_l[:, None] * CHUNK + rows_m[None, :]
    tl.store(dscore_ptrs, acc, mask=mask_l[:, None] & mask_m[None, :])


@triton.jit
def input_grads_kernel(
    dy, x, b, scores, dstates, dt, da_cumsum, d, dx, ddt, dd, y_batch, y_token, y_head, x_batch, x_token, x_head,
    b_batch, b_token, b_group, tokens, chunks,
    GROUP_HEADS: tl.constexpr, CHUNK: tl.constexpr, HEAD_DIM: tl.constexpr, STATE: tl.constexpr,
    BLOCK_L: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute gradients of x of one block and head, and per token those of dt (where it scales x) and of d."""
    batch_chunk, head, heads = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    batch, chunk = batch_chunk // chunks, batch_chunk % chunks
    first = chunk * CHUNK
    rows_m, p = tl.program_id(2) * BLOCK_L + tl.arange(0, BLOCK_L), tl.arange(0, BLOCK_P)
    mask_m = rows_m < CHUNK
    valid_m = mask_m & (first + rows_m < tokens)
    dy += batch * y_batch + first * y_token + head * y_head
    x += batch * x_batch + first * x_token + head * x_head
    b += batch * b_batch + first * b_token + head // GROUP_HEADS * b_group
    dstates += (batch_chunk * heads + head) * HEAD_DIM * STATE
    scores += (batch_chunk * (heads // GROUP_HEADS) + head // GROUP_HEADS) * CHUNK * CHUNK
    token_offset = ((batch * heads + head) * chunks + chunk) * CHUNK
    da_M = tl.load(da_cumsum + token_offset + rows_m, mask=mask_m, other=0.0)

    acc = tl.zeros((BLOCK_L, BLOCK_P), tl.float32)  # gradient of dt * x
    for start in range(0, STATE, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        b_MN = _load(b, rows_m, b_token, n, valid_m, n < STATE)
        dstate_NP = _load_transposed(dstates, n, p, STATE, n < STATE, p < HEAD_DIM)
        acc = tl.dot(b_MN, dstate_NP, acc, input_precision="ieee")
    acc *= tl.where(mask_m, tl.exp(tl.load(da_cumsum + token_offset + CHUNK - 1) - da_M), 0.0)[:, None]
    for start in range(tl.program_id(2) * BLOCK_L, CHUNK, BLOCK_L):
        rows_l = start + tl.arange(0, BLOCK_L)
        mask_l = rows_l < CHUNK
        da_L = tl.load(da_cumsum + token_offset + rows_l, mask=mask_l, other=0.0)
        score_LM = _load(scores, rows_l, CHUNK, rows_m, mask_l, mask_m)
        weight_LM = score_LM * _decay_matrix(da_L, da_M, rows_l, rows_m, CHUNK)
        dy_LP = _load(dy, rows_l, y_token, p, mask_l & (first + rows_l < tokens), p < HEAD_DIM)
        acc = tl.dot(tl.trans(weight_LM).to(dy_LP.dtype), dy_LP, acc, input_precision="ieee")
    x_MP = _load(x, rows_m, x_token, p, valid_m, p < HEAD_DIM).to(tl.float32)
    dy_MP = _load(dy, rows_m, y_token, p, valid_m, p < HEAD_DIM).to(tl.float32)
    dt_M = tl.load(dt + token_offset + rows_m, mask=mask_m, other=0.0)
    tl.store(ddt + token_offset + rows_m, tl.sum(x_MP * acc, axis=1), mask=mask_m)
    tl.store(dd + token_offset + rows_m, tl.sum(x_MP * dy_MP, axis=1), mask=mask_m)
    acc = acc * dt_M[:, None] + tl.load(d + head) * dy_MP
    dx += ((batch * tokens + first) * heads + head) * HEAD_DIM
    tl.store(
        dx + rows_m[:, None] * heads * HEAD_DIM + p[None, :],
        acc.to(dx.dtype.element_ty),
        mask=valid_m[:, None] & (p < HEAD_DIM)[None, :],
    )


@triton.jit
def key_grads_kernel(
    v, weights, states, dscores, key, query, out, dlog, v_batch, v_token, v_head, key_batch, key_token, key_group,
    query_batch, query_token, query_group, tokens, chunks, heads,
    TRANSPOSED: tl.constexpr, GROUP_HEADS: tl.constexpr, CHUNK: tl.constexpr, HEAD_DIM: tl.constexpr,
    STATE: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute gradients of c (or of b if TRANSPOSED), summed over a group: through the states and through the scores.

    `key` is that tensor and `query` the other one. `dlog` receives each token's product of key and the first part,
    which the gradient of the decays needs.
    """
    blocks_n: tl.constexpr = (STATE + BLOCK_N - 1) // BLOCK_N
    pid_l, pid_n = tl.program_id(2) // blocks_n, tl.program_id(2) % blocks_n
    batch_chunk, group, groups = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    batch, chunk = batch_chunk // chunks, batch_chunk % chunks
    first = chunk * CHUNK
    rows_l, p = pid_l * BLOCK_L + tl.arange(0, BLOCK_L), tl.arange(0, BLOCK_P)
    n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_l = rows_l < CHUNK
    valid_l = mask_l & (first + rows_l < tokens)
    key += batch * key_batch + first * key_token + group * key_group
    query += batch * query_batch + first * query_token + group * query_group
    dscores += (batch_chunk * groups + group) * CHUNK * CHUNK
    key_LN = _load(key, rows_l, key_token, n, valid_l, n < STATE)
    acc = tl.zeros((BLOCK_L, BLOCK_N), tl.float32)
    for member in range(GROUP_HEADS):
        head = group * GROUP_HEADS + member
        token_offset = ((batch * heads + head) * chunks + chunk) * CHUNK
        weight_L = tl.load(weights + token_offset + rows_l, mask=mask_l, other=0.0)
        v_LP = _load(v + batch * v_batch + first * v_token + head * v_head, rows_l, v_token, p, valid_l, p < HEAD_DIM)
        state = states + (batch_chunk * heads + head) * HEAD_DIM * STATE
        state_PN = _load(state, p, STATE, n, p < HEAD_DIM, n < STATE)
        from_state_LN = tl.dot(v_LP, state_PN, input_precision="ieee") * weight_L[:, None]
        acc += from_state_LN
        partial = pid_n * tl.num_programs(0) * heads * CHUNK
        tl.store(dlog + partial + token_offset + rows_l, tl.sum(from_state_LN * key_LN, axis=1), mask=mask_l)
    begin = pid_l * BLOCK_L if TRANSPOSED else 0
    end = CHUNK if TRANSPOSED else (pid_l + 1) * BLOCK_L
    for start in range(begin, end, BLOCK_L):
        rows_m = start + tl.arange(0, BLOCK_L)
        mask_m = rows_m < CHUNK
        if TRANSPOSED:
            dscore_LM = _load_transposed(dscores, rows_l, rows_m, CHUNK, mask_l, mask_m)
        else:
            dscore_LM = _load(dscores, rows_l, CHUNK, rows_m, mask_l, mask_m)
        query_MN = _load(query, rows_m, query_token, n, mask_m & (first + rows_m < tokens), n < STATE)
        acc = tl.dot(dscore_LM.to(query_MN.dtype), query_MN, acc, input_precision="ieee")
    out += ((batch * tokens + first) * groups + group) * STATE
    tl.store(
        out + rows_l[:, None] * groups * STATE + n[None, :],
        acc.to(out.dtype.element_ty),
        mask=valid_l[:, None] & (n < STATE)[None, :],
    )

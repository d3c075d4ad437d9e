"""Small programs that together use everything the passes can place, a feature or a combination each. `PROGRAMS`: name → source."""

from __future__ import annotations

PROGRAMS = {
    name: text
    for name, _, text in (
        block.strip().partition("\n")
        for block in """
column_bias_other_order
program p(x: bf16[m, k], w: bf16[n, k], b: bf16[m]) -> (y: bf16[n, m])
y = relu(x @ w + b)
=====
all_layouts
program p(x: bf16[k, m], w: bf16[k, n], r: bf16[n, m], s: f32[]) -> (y: bf16[m, n], t: f32[n, m])
z = x @ w
t = z * s
y = t + r
=====
raw_and_used
program p(x: bf16[m, k], w: bf16[n, k], b: bf16[n]) -> (z: f32[m, n], y: bf16[m, n])
z = x @ w
y = gelu_tanh(z + b)
=====
rounding_kept
program p(x: bf16[m, k], w: bf16[n, k], r: bf16[m, n]) -> (y: f32[m, n])
y = f32(bf16(x @ w)) + bf16(r * 1.25)
=====
row_groups
program p(x: bf16[b, t, k], w: bf16[n, k], r: bf16[b, t, n], s: f32[b], c: f32[t]) -> (y: bf16[b, t, n])
y = (x @ w) * s * c + r
=====
contracted_group
program p(x: bf16[m, h, d], w: bf16[n, h, d]) -> (y: bf16[m, n])
y = x @ w
=====
contracted_group_apart
program p(x: bf16[m, h, d], w: bf16[n, h, d]) -> (y: bf16[m, n], z: bf16[m, n])
y = x @ w
z = tanh(x @ w)
=====
subset_of_columns
program p(x: bf16[m, d], w: bf16[head, pair=16, d], s: f32[head], f: f32[pair], g: f32[m, head], q: f32[m, pair])
    -> (y: bf16[m, head, pair])
y = (x @ w) * s * f + g * q
=====
halves
program p(x: bf16[m, d], w: bf16[lane=2, f, d]) -> (y: bf16[m, f])
gate, up = x @ w
y = silu(gate) * up
=====
halves_stored
program p(x: bf16[m, d], w: bf16[lane=2, f, d], b: bf16[lane, f]) -> (y: bf16[m, f], z: bf16[m, lane, f])
z = x @ w + b
gate, up = z
y = silu(gate) * up
=====
lane_innermost_of_weight
program p(x: bf16[m, d], w: bf16[d, f, lane=2]) -> (y: bf16[m, f])
gate, up = x @ w
y = silu(gate) * up
=====
lane_without_product
program p(x: bf16[m, d], w: bf16[f, d], r: bf16[m, f, lane=2], c: f32[f, lane]) -> (y: bf16[m, f, lane])
z = x @ w
a, b = r
s, t = c
y = pack[lane](z * a + s, z - b * t)
=====
three_lanes
program p(x: bf16[m, d], w: bf16[three=3, f, d]) -> (y: bf16[m, f], z: bf16[m, f, three])
a, b, c = x @ w
y = a * b + c
z = pack[three](c, b, a)
=====
four_segments
program p(x: bf16[m, d], w: bf16[f, lane=2, d], v: bf16[lane, f, d]) -> (y: bf16[m, f])
a, b = x @ w
c, d2 = x @ v
y = silu(a) * b + silu(c) * d2
=====
lora_swiglu
program p(x: bf16[m, k], wg: bf16[f, k], wu: bf16[f, k], t: bf16[m, r], bg: bf16[f, r], bu: bf16[f, r]) -> (y: bf16[m, f])
gate = x @ wg + t @ bg
up   = x @ wu + t @ bu
y = silu(gate) * up
=====
bias_between_products
program p(x: bf16[m, k], w: bf16[n, k], t: bf16[m, r], b: bf16[n, r], c: bf16[n]) -> (y: bf16[m, n])
y = relu((x @ w + c) + t @ b)
=====
same_rows_summed
program p(x: bf16[m, k], w: bf16[n, k], v: bf16[n, k]) -> (y: bf16[m, n])
y = x @ w + x @ v
=====
rope_interleaved
program p(x: bf16[m, d], w: bf16[head, pair=8, lane=2, d], pos: i32[m], const freq: f32[pair]) -> (y: bf16[m, head, pair, lane])
y = rope[lane](x @ w, pos, freq)
=====
rope_f32_out
program p(x: bf16[m, d], w: bf16[head, lane=2, pair=8, d], pos: i32[m], const freq: f32[pair]) -> (y: f32[m, head, pair, lane])
y = rope_clockwise[lane](x @ w, pos, freq)
=====
rope_table
program p(x: bf16[m, d], w: bf16[head, lane=2, pair=8, d], c: f32[m, pair], s: f32[m, pair]) -> (y: bf16[m, head, lane, pair])
y = rotate[lane](x @ w, c, s)
=====
head_norm_and_statistic
program p(x: bf16[m, d], w: bf16[head, hd=16, d], g: bf16[hd]) -> (y: bf16[m, head, hd], r: f32[m, head])
param eps = 1e-6
z = x @ w
r = rsqrt(mean[hd](z * z) + eps)
y = z * r * g
=====
head_layernorm
program p(x: bf16[m, d], w: bf16[head, hd=16, d], g: bf16[hd], b: bf16[hd]) -> (y: bf16[m, head, hd])
y = layernorm[hd](x @ w, g, b, 1e-5)
=====
head_softmax
program p(x: bf16[m, d], w: bf16[head, hd=8, d]) -> (y: bf16[m, head, hd])
y = softmax[hd](x @ w)
=====
head_norm_over_lanes
program p(x: bf16[m, d], w: bf16[head, lane=2, pair=8, d], pos: i32[m], const freq: f32[pair], g: f32[lane, pair])
    -> (y: bf16[m, head, lane, pair])
z = rmsnorm[lane, pair](x @ w, g, 1e-6)
y = rope[lane](z, pos, freq)
=====
head_extremes
program p(x: bf16[m, d], w: bf16[head, hd=8, d]) -> (lo: f32[m, head], hi: f32[m, head], a: f32[m, head], l: f32[m, head])
z  = x @ w
lo = min[hd](z)
hi = max[hd](z)
a  = amax[hd](z)
l  = logsumexp[hd](z)
=====
whole_row_in_tile
program p(x: bf16[m, d], w: bf16[hd=64, d], g: bf16[hd]) -> (y: bf16[m, hd])
y = rmsnorm[hd](x @ w, g, 1e-5)
=====
column_sums
program p(x: bf16[m, k], w: bf16[n, k]) -> (y: bf16[m, n], s: f32[n], big: f32[n], l: f32[n])
y   = x @ w
s   = sum[m](y)
big = max[m](y)
l   = logsumexp[m](y)
=====
everything_reduced
program p(x: bf16[m, k], w: bf16[n, k]) -> (a: f32[], b: f32[], c: f32[], d: f32[], e: f32[])
z = x @ w
a = sum[m, n](z)
b = mean[n, m](z)
c = max[m, n](z)
d = amax[m, n](z)
e = logsumexp[m, n](z)
=====
row_means
program p(x: bf16[m, k], w: bf16[n, k]) -> (mu: f32[m], var: f32[m], lo: bf16[m])
z   = x @ w
mu  = mean[n](z)
var = mean[n](z * z) - mu * mu
lo  = min[n](z)
=====
loss_mean
program p(x: bf16[m, d], w: bf16[v, d], target: i64[m]) -> (loss: f32[], each: f32[m])
z    = x @ w
each = cross_entropy[v](z, target)
kept = sum[m](where(target == -100, 0.0, 1.0) + 0.0 * each)
loss = sum[m](each) / max(kept, 1.0)
=====
loss_scaled_by_total
program p(x: bf16[m, d], w: bf16[v, d], target: i64[m]) -> (loss: f32[m])
z    = x @ w
each = cross_entropy[v](z, target)
loss = each / sum[m](each)
=====
smoothed
program p(x: bf16[m, d], w: bf16[v, d], target: i64[m]) -> (loss: f32[m], z2: f32[m])
z    = x @ w
loss = smoothed_cross_entropy[v](z, target, 0.1)
z2   = z_loss[v](z, 1e-4)
=====
gather_rows
program p(x: bf16[m, d], w: bf16[n, d], i: i32[n]) -> (z: f32[n])
z = gather[m](x @ w, i)
=====
positions
program p(x: bf16[m, d], w: bf16[n, d]) -> (y: f32[m, n])
y = where(index[m] >= index[n], x @ w, -inf) / f32(size[n])
=====
causal_heads
program p(x: bf16[b, t, d], w: bf16[head, hd=8, d]) -> (y: f32[b, t, head, hd])
y = (x @ w) * f32(index[t]) + f32(index[head] * 8 + index[hd]) + f32(index[b])
=====
runs
program p(x: bf16[m, d], w: bf16[head=6, hd=8, d], g: f32[qh=3, hd], s: f32[kh=2]) -> (q: bf16[m, qh, hd], k: f32[m, kh, hd], rest: f32[m])
q0, k0, v0 = split[head -> qh, kh, vh=1](x @ w)
q = q0 * g
k = k0 * s
rest = sum[vh, hd](v0)
=====
runs_joined
program p(x: bf16[m, d], w: bf16[head=6, hd=8, d], g: f32[qh=4]) -> (y: bf16[m, head, hd])
q, k = split[head -> qh, kh=2](x @ w)
y = pack[qh, kh -> head](q * g, relu(k))
=====
runs_normed
program p(x: bf16[m, d], w: bf16[head=6, hd=8, d], g: bf16[hd]) -> (q: bf16[m, qh=4, hd], v: bf16[m, vh=2, hd], r: f32[m, qh])
q0, v = split[head -> qh, vh](x @ w)
ms = mean[hd](q0 * q0)
r = rsqrt(ms + 1e-6)
q = q0 * r * g
=====
renamed_port
program p(x: bf16[m, d], w: bf16[n, d]) -> (y: bf16[m, n])
y = x @ w + rename[d -> n](x)
=====
gram
program p(x: bf16[m, d]) -> (y: bf16[m, n])
y = x @ rename[m -> n](x)
=====
renamed_result
program p(x: bf16[m, d], w: bf16[n, d], b: f32[e]) -> (y: bf16[m, e])
y = rename[n -> e](x @ w) + b
=====
input_passed_on
program p(x: bf16[m, d], w: bf16[n, d], r: bf16[m, n], c: f32[m], i: i32[n]) -> (y: bf16[m, n], r2: bf16[m, n], c2: f32[m], i2: f32[n])
y  = x @ w
r2 = r
c2 = exp(c)
i2 = f32(i)
=====
integers_and_bools
program p(x: bf16[m, d], w: bf16[n, d], seg: i32[m], tag: i64[n], keep: bool[m, n]) -> (y: bf16[m, n])
y = where(f32(seg) == f32(tag) or not keep, 0.0, x @ w)
=====
two_k_segments_reduced
program p(x: bf16[m, k], w: bf16[n, k], t: bf16[m, r], b: bf16[n, r], res: bf16[m, n])
    -> (u: bf16[m, n], ms: f32[m], total: f32[n], peak: f32[])
u = x @ w + t @ b + res
ms = mean[n](u * u)
total = sum[m](u)
peak = amax[m, n](u)
=====
lanes_reduced
program p(x: bf16[m, d], w: bf16[f, lane=2, d]) -> (s: f32[m], c: f32[f], l: f32[m], a: f32[m], b: f32[m])
z = x @ w
g, u = z
s = sum[f, lane](z)
c = max[m, lane](z)
l = logsumexp[f, lane](z)
a, b = sum[f](z)
=====
matmul_named
program p(x: bf16[m, k], w: bf16[n, k]) -> (y: f16[m, n])
y = matmul[k](x, w)
=====
f16_and_f32
program p(x: f16[m, k], w: f16[n, k], g: f32[n], r: f32[m, n]) -> (y: f16[m, n], z: f32[m, n])
z = (x @ w) * g + r
y = clamp(z, -2.0, 2.0)
=====
weight_columns_split
program p(x: bf16[m, d], w: bf16[pair=8, head, d], c: f32[head]) -> (y: bf16[m, head, pair])
y = (x @ w) * c
=====
python_keywords
program lambda_(x: bf16[m, d], w: bf16[f, d], in_: f32[f]) -> (is_: bf16[m, f])
f = x @ w
size = f * in_
is_ = size
=====
lanes_on_the_left
program p(x: bf16[m, lane=2, k], w: bf16[n, k]) -> (y: bf16[n, m])
a, b = x @ w
y = a * b
=====
lane_of_input
program p(x: bf16[m, d], w: bf16[lane=2, n, d], r: bf16[m, lane, n]) -> (y: bf16[m, n])
w0, w1 = w
r0, r1 = r
y = x @ w0 + r1
=====
layer_norm_block
program p(a: bf16[m, h], x0: bf16[m, d], wo: bf16[d, h], bo: bf16[d], g: bf16[d], b: bf16[d], w1: bf16[f, d], b1: bf16[f], w2: bf16[d, f])
    -> (x2: bf16[m, d])
x1: bf16 = a @ wo + bo + x0
n = layernorm[d](x1, g, b, 1e-5)
x2 = gelu_tanh(n @ w1 + b1) @ w2 + x1
=====
moments_every_way
program p(x: bf16[m, k], w: bf16[n, k], c: f32[m]) -> (rows: f32[m], other: f32[m], cols: f32[n], all: f32[], across: f32[])
z = x @ w
e = z - mean[n](z)
rows = mean[n](e ** 2)
u = sum[n](z) / size[n] - z
other = sqrt(sum[n](square(u)) / (size[n] + 1) + 1.0)
v = z - mean[m](z)
cols = sum[m](v * v)
t = z - mean[m, n](z)
all = mean[m, n](t * t)
across = mean[m](square(c - mean[m](c)))
=====
moments_of_lanes
program p(x: bf16[m, d], w: bf16[lane=2, f, d]) -> (s: f32[m], c: f32[lane, m])
z = x @ w
e = z - mean[lane, f](z)
s = mean[lane, f](e * e)
l = z - mean[f](z)
c = sum[f](l * l)
=====
moments_of_runs
program p(x: bf16[m, d], w: bf16[h=520, d]) -> (y: bf16[m, q], k: bf16[m, h], v: bf16[m, r])
k = x @ w
q, u = split[h -> q=512, r=8](k)
v = tanh(u)
e = q - mean[q](q)
y = e * rsqrt(mean[q](e * e) + 0.1)
=====
sums_that_split
program p(x: bf16[m, k], w: bf16[n, k], v: bf16[n, k], c: f32[n]) -> (y: f32[m, n], t: f32[m])
z = x @ w
u = x @ v
r = 1.0 / (1.0 + square(mean[n](z * z)))
t = sum[n](r * (z - u / (2.0 + r)) - r * r + c * z)
y = z * t
=====
rows_layer_norm
program p(x: bf16[m, d], r: bf16[m, d], g: bf16[d], b: bf16[d]) -> (h: bf16[m, d], y: bf16[m, d], mu: f32[m])
h = x + r
mu = mean[d](h)
y = layernorm[d](h, g, b, 1e-5)
=====
rows_rms_of_lanes
program p(x: bf16[m, d, lane=2], g: f32[lane, d]) -> (y: bf16[m, d, lane], s: f32[m])
s = mean[lane, d](x * x)
y = x * rsqrt(s + 0.1) * g
=====
rows_softmax_thrice
program p(x: f32[b, t, n], s: f32[b], u: bf16[n]) -> (p: bf16[b, t, n], e: f32[b, t], l: f32[b, t], top: f32[b, t])
z = x * s + u
top = max[n](z)
l = logsumexp[n](z)
e = sum[n](exp(z - l) * z)
p = exp(z - l) * (z - e) + f32(index[n]) * top
=====
rows_of_heads
program p(x: bf16[m, head, hd=8], g: bf16[head, hd]) -> (y: bf16[m, head, hd])
y = x * rsqrt(mean[head, hd](x * x) + 0.01) * g
=====
columns_softmax
program p(x: f32[m, n]) -> (y: f32[m, n])
y = softmax[m](x)
""".split("=====\n")
    )
}

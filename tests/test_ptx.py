"""The readers of PTX, on snippets."""

from jaxserve.bench.ptx import arithmetic, kernel_name, stores_before_wgmma_are_fenced, stores_for_wgmma

STORE = "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r1], {%r2, %r3, %r4, %r5};\n"
FENCE = "fence.proxy.async.shared::cta;\n"
PRODUCT = "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%f1}, %rd1, %rd2, p, 1, 1, 0, 0;\n"


def test_a_missing_fence_is_seen():
    assert stores_before_wgmma_are_fenced(STORE * 2 + FENCE + PRODUCT * 3)
    assert stores_before_wgmma_are_fenced(PRODUCT + STORE + FENCE + PRODUCT)
    assert not stores_before_wgmma_are_fenced(STORE + PRODUCT)
    assert not stores_before_wgmma_are_fenced(STORE + FENCE + PRODUCT + STORE + PRODUCT)
    assert not stores_before_wgmma_are_fenced("st.shared.v2.b32 [%r1], {%r2, %r3};\n" + PRODUCT)
    assert not stores_before_wgmma_are_fenced(STORE + FENCE)  # not the kernel that was meant
    assert [stores_for_wgmma(text) for text in (STORE, PRODUCT, PRODUCT + STORE)] == [False, False, True]


def test_a_kernel_is_known_by_its_function():
    assert kernel_name(".visible .entry paged_decode_mosaic_gpu_kernel(\n\t.param") == "paged_decode"


def test_contracted_arithmetic_is_seen():
    apart = "mul.f32 %f3, %f1, %f2;\nadd.f32 %f5, %f3, %f4;\nex2.approx.ftz.f32 %f6, %f5;\n"
    assert arithmetic(apart) == {"mul.f32": 1, "add.f32": 1, "ex2.approx.ftz.f32": 1}
    assert arithmetic("fma.rn.f32 %f5, %f1, %f2, %f4;\nex2.approx.ftz.f32 %f6, %f5;\n") != arithmetic(apart)

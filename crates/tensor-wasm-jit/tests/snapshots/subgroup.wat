;; The sum over a subgroup: where all lanes of the warp are here, exchanges and additions. What is done where some are
;; not comes after the rest, and is not shown.
(module
  (import "kernel" "global_id" (func $global_id (param i32) (result i32)))
  (import "kernel" "subgroup_add_f32" (func $sum (param f32) (result f32)))
  (memory 1)
  (func (export "k") (param $x i32) (local $at i32)
    (local.set $at (i32.add (local.get $x) (i32.shl (call $global_id (i32.const 0)) (i32.const 2))))
    (f32.store (local.get $at) (call $sum (f32.load (local.get $at))))))

;; The PTX, without declarations, polls and traps:
;;     ld.param.u64 %control, [control];
;;     ld.param.u64 %record, [record];
;;     ld.param.u64 %launch, [launch];
;;     ld.param.u32 %budget, [budget];
;;     mov.b32 %fuel, 262144;
;;     ld.param.u64 %window0, [window0];
;;     ld.param.u32 %r0, [start0];
;;     cvt.u64.u32 %start0, %r0;
;;     ld.param.u32 %t25, [size0];
;;     cvt.u64.u32 %size0, %t25;
;;     mov.b32 %worst0, 0;
;;     cvt.u32.u64 %base0, %start0;
;;     cvt.u32.u64 %t26, %size0;
;;     sub.s32 %limit0, %t26, 4;
;;     and.b32 %limit0, %limit0, -4;
;;     mov.b32 %r1, 0;
;;     mov.b32 %r2, 0;
;;     mov.u32 %t0, %ntid.x;
;;     mov.u32 %t2, %ctaid.x;
;;     mov.u32 %t1, %tid.x;
;;     mad.lo.s32 %r3, %t2, %t0, %t1;
;;     mov.b32 %r4, 2;
;;     and.b32 %t3, %r4, 31;
;;     shl.b32 %r5, %r3, %t3;
;;     add.s32 %r6, %r0, %r5;
;;     add.s32 %t4, %r5, 0;
;;     max.u32 %worst0, %worst0, %t4;
;;     min.u32 %t4, %t4, %limit0;
;;     cvt.u64.u32 %u0, %t4;
;;     add.s64 %u0, %u0, %window0;
;;     ld.global.f32 %f7, [%u0];
;;     activemask.b32 %t5;
;;     setp.ne.s32 %q0, %t5, -1;
;;     @%q0 bra W1;
;;     shfl.sync.bfly.b32 %x0, %f7, 16, 31, -1;
;;     add.rn.f32 %x1, %f7, %x0;
;;     shfl.sync.bfly.b32 %x2, %x1, 8, 31, -1;
;;     add.rn.f32 %x3, %x1, %x2;
;;     shfl.sync.bfly.b32 %x4, %x3, 4, 31, -1;
;;     add.rn.f32 %x5, %x3, %x4;
;;     shfl.sync.bfly.b32 %x6, %x5, 2, 31, -1;
;;     add.rn.f32 %x7, %x5, %x6;
;;     shfl.sync.bfly.b32 %x8, %x7, 1, 31, -1;
;;     add.rn.f32 %x9, %x7, %x8;
;;     mov.f32 %f8, %x9;
;; Y1:
;;     setp.nan.f32 %q7, %f8, %f8;
;;     selp.f32 %f9, 0f7FC00000, %f8, %q7;
;;     add.s32 %t24, %r5, 0;
;;     max.u32 %worst0, %worst0, %t24;
;;     min.u32 %t24, %t24, %limit0;
;;     cvt.u64.u32 %u1, %t24;
;;     add.s64 %u1, %u1, %window0;
;;     st.global.f32 [%u1], %f9;
;; L1:
;;     setp.gt.u32 %q8, %worst0, %limit0;
;;     @%q8 bra BAD_0;
;;     ret;

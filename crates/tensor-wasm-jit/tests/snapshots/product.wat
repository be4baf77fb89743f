;; A product of matrices on tensor cores: where all lanes of the warp are here it is one instruction, whose four sums
;; are asked for one by one. What is done where some are not comes after the rest, and is not shown.
(module
  (import "kernel" "subgroup_lane" (func $lane (result i32)))
  (import "kernel" "mma_f16_f32" (func $multiply (param i32 i32 i32 i32 i32 i32 f32 f32 f32 f32)))
  (import "kernel" "mma_sum" (func $sum (param i32) (result f32)))
  (memory 1)
  (func (export "k") (param $x i32) (local $at i32)
    (local.set $at (i32.add (local.get $x) (i32.shl (call $lane) (i32.const 4))))
    (call $multiply
      (i32.load (local.get $at)) (i32.load offset=4 (local.get $at))
      (i32.load offset=8 (local.get $at)) (i32.load offset=12 (local.get $at))
      (i32.load (local.get $at)) (i32.load offset=4 (local.get $at))
      (f32.const 0) (f32.const 0) (f32.const 0) (f32.const 0))
    (f32.store (local.get $at) (call $sum (i32.const 0)))
    (f32.store offset=4 (local.get $at) (call $sum (i32.const 1)))
    (f32.store offset=8 (local.get $at) (call $sum (i32.const 2)))
    (f32.store offset=12 (local.get $at) (call $sum (i32.const 3)))))

;; The PTX, without declarations, polls and traps:
;;     ld.param.u64 %control, [control];
;;     ld.param.u64 %record, [record];
;;     ld.param.u64 %launch, [launch];
;;     ld.param.u32 %budget, [budget];
;;     mov.b32 %fuel, 262144;
;;     ld.param.u64 %window0, [window0];
;;     ld.param.u32 %r5, [start0];
;;     cvt.u64.u32 %start0, %r5;
;;     ld.param.u32 %t34, [size0];
;;     cvt.u64.u32 %size0, %t34;
;;     mov.b32 %worst0, 0;
;;     cvt.u32.u64 %base0, %start0;
;;     cvt.u32.u64 %t35, %size0;
;;     sub.s32 %limit0, %t35, 16;
;;     and.b32 %limit0, %limit0, -16;
;;     mov.f32 %f0, 0f00000000;
;;     mov.f32 %f1, %f0;
;;     mov.f32 %f2, %f0;
;;     mov.f32 %f3, %f0;
;;     mov.f32 %f4, %f0;
;;     mov.b32 %r6, 0;
;;     mov.u32 %r7, %tid.z;
;;     mov.u32 %r8, %ntid.y;
;;     mov.u32 %r9, %tid.y;
;;     mul.lo.s32 %r10, %r7, %r8;
;;     add.s32 %r11, %r10, %r9;
;;     mov.u32 %r12, %ntid.x;
;;     mov.u32 %r13, %tid.x;
;;     mul.lo.s32 %r14, %r11, %r12;
;;     add.s32 %r15, %r14, %r13;
;;     mov.b32 %r16, 31;
;;     and.b32 %r17, %r15, %r16;
;;     mov.b32 %r18, 4;
;;     and.b32 %t0, %r18, 31;
;;     shl.b32 %r19, %r17, %t0;
;;     add.s32 %r20, %r5, %r19;
;;     add.s32 %t1, %r19, 0;
;;     max.u32 %worst0, %worst0, %t1;
;;     min.u32 %t1, %t1, %limit0;
;;     cvt.u64.u32 %u0, %t1;
;;     add.s64 %u0, %u0, %window0;
;;     ld.global.v4.u32 {%r21, %r22, %r23, %r24}, [%u0+0];
;;     ld.global.u32 %r25, [%u0+0];
;;     ld.global.u32 %r26, [%u0+4];
;;     mov.f32 %f27, 0f00000000;
;;     mov.f32 %f28, 0f00000000;
;;     mov.f32 %f29, 0f00000000;
;;     mov.f32 %f30, 0f00000000;
;;     activemask.b32 %t2;
;;     setp.ne.s32 %q0, %t2, -1;
;;     @%q0 bra W1;
;;     mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%f31, %f32, %f33, %f34}, {%r21, %r22, %r23, %r24}, {%r25, %r26}, {%f27, %f28, %f29, %f30};
;; Y1:
;;     mov.f32 %f1, %f31;
;;     mov.f32 %f2, %f32;
;;     mov.f32 %f3, %f33;
;;     mov.f32 %f4, %f34;
;;     mov.b32 %r35, 0;
;;     mov.f32 %f36, %f1;
;;     setp.nan.f32 %q7, %f36, %f36;
;;     selp.f32 %f43, 0f7FC00000, %f36, %q7;
;;     add.s32 %t33, %r19, 0;
;;     max.u32 %worst0, %worst0, %t33;
;;     min.u32 %t33, %t33, %limit0;
;;     cvt.u64.u32 %u1, %t33;
;;     add.s64 %u1, %u1, %window0;
;;     mov.b32 %r37, 1;
;;     mov.f32 %f38, %f2;
;;     setp.nan.f32 %q8, %f38, %f38;
;;     selp.f32 %f44, 0f7FC00000, %f38, %q8;
;;     mov.b32 %r39, 2;
;;     mov.f32 %f40, %f3;
;;     setp.nan.f32 %q9, %f40, %f40;
;;     selp.f32 %f45, 0f7FC00000, %f40, %q9;
;;     mov.b32 %r41, 3;
;;     mov.f32 %f42, %f4;
;;     setp.nan.f32 %q10, %f42, %f42;
;;     selp.f32 %f46, 0f7FC00000, %f42, %q10;
;;     st.global.v4.f32 [%u1+0], {%f43, %f44, %f45, %f46};
;; L1:
;;     setp.gt.u32 %q11, %worst0, %limit0;
;;     @%q11 bra BAD_0;
;;     ret;

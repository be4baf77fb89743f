;; Calls: each is the function's operations in its place, with the caller's registers, so that what it does with a
;; pointer is checked against the caller's window.
(module
  (memory 1)
  (func $twice (param $p i32) (result f32) (f32.mul (f32.load (local.get $p)) (f32.const 2)))
  (func (export "k") (param $p i32) (param $q i32)
    (f32.store (local.get $q) (f32.add (call $twice (local.get $p)) (call $twice (local.get $q))))))

;; The PTX, without declarations, polls and traps:
;;     ld.param.u64 %control, [control];
;;     ld.param.u64 %record, [record];
;;     ld.param.u64 %launch, [launch];
;;     ld.param.u32 %budget, [budget];
;;     mov.b32 %fuel, 262144;
;;     ld.param.u64 %window0, [window0];
;;     ld.param.u32 %r0, [start0];
;;     cvt.u64.u32 %start0, %r0;
;;     ld.param.u32 %t3, [size0];
;;     cvt.u64.u32 %size0, %t3;
;;     ld.param.u64 %window1, [window1];
;;     ld.param.u32 %r1, [start1];
;;     cvt.u64.u32 %start1, %r1;
;;     ld.param.u32 %t4, [size1];
;;     cvt.u64.u32 %size1, %t4;
;;     mov.b32 %worst0, 0;
;;     cvt.u32.u64 %base0, %start0;
;;     cvt.u32.u64 %t5, %size0;
;;     sub.s32 %limit0, %t5, 4;
;;     and.b32 %limit0, %limit0, -4;
;;     mov.b32 %worst1, 0;
;;     cvt.u32.u64 %base1, %start1;
;;     cvt.u32.u64 %t6, %size1;
;;     sub.s32 %limit1, %t6, 4;
;;     and.b32 %limit1, %limit1, -4;
;;     sub.s32 %t0, %r0, %base0;
;;     max.u32 %worst0, %worst0, %t0;
;;     min.u32 %t0, %t0, %limit0;
;;     cvt.u64.u32 %u0, %t0;
;;     add.s64 %u0, %u0, %window0;
;;     ld.global.f32 %f3, [%u0];
;;     mov.f32 %f4, 0f40000000;
;;     mul.rn.f32 %f5, %f3, %f4;
;;     mov.f32 %f2, %f5;
;; L2:
;;     sub.s32 %t1, %r1, %base1;
;;     max.u32 %worst1, %worst1, %t1;
;;     min.u32 %t1, %t1, %limit1;
;;     cvt.u64.u32 %u1, %t1;
;;     add.s64 %u1, %u1, %window1;
;;     ld.global.f32 %f7, [%u1];
;;     mov.f32 %f8, 0f40000000;
;;     mul.rn.f32 %f9, %f7, %f8;
;;     mov.f32 %f6, %f9;
;; L3:
;;     add.rn.f32 %f10, %f2, %f6;
;;     setp.nan.f32 %q0, %f10, %f10;
;;     selp.f32 %f11, 0f7FC00000, %f10, %q0;
;;     sub.s32 %t2, %r1, %base1;
;;     max.u32 %worst1, %worst1, %t2;
;;     min.u32 %t2, %t2, %limit1;
;;     cvt.u64.u32 %u2, %t2;
;;     add.s64 %u2, %u2, %window1;
;;     st.global.f32 [%u2], %f11;
;; L1:
;;     setp.gt.u32 %q1, %worst0, %limit0;
;;     @%q1 bra BAD_0;
;;     setp.gt.u32 %q2, %worst1, %limit1;
;;     @%q2 bra BAD_1;
;;     ret;

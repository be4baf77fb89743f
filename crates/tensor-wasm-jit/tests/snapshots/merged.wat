;; Checks that are merged: three loads a fixed distance apart are one check, of all the bytes from the first to the
;; last.
(module
  (memory 1)
  (func (export "k") (param $i i32) (param $p i32) (param $out i32) (local $at i32)
    (local.set $at (i32.add (local.get $p) (i32.shl (local.get $i) (i32.const 2))))
    (f32.store (local.get $out)
      (f32.add (f32.load (local.get $at))
        (f32.add (f32.load offset=8 (local.get $at)) (f32.load offset=20 (local.get $at)))))))

;; The PTX, without declarations, polls and traps:
;;     ld.param.u64 %control, [control];
;;     ld.param.u64 %record, [record];
;;     ld.param.u64 %launch, [launch];
;;     ld.param.u32 %budget, [budget];
;;     mov.b32 %fuel, 262144;
;;     ld.param.u32 %r0, [p0];
;;     ld.param.u64 %window1, [window1];
;;     ld.param.u32 %r1, [start1];
;;     cvt.u64.u32 %start1, %r1;
;;     ld.param.u32 %t3, [size1];
;;     cvt.u64.u32 %size1, %t3;
;;     ld.param.u64 %window2, [window2];
;;     ld.param.u32 %r2, [start2];
;;     cvt.u64.u32 %start2, %r2;
;;     ld.param.u32 %t4, [size2];
;;     cvt.u64.u32 %size2, %t4;
;;     mov.b32 %worst0, 0;
;;     cvt.u32.u64 %base0, %start1;
;;     cvt.u32.u64 %t5, %size1;
;;     sub.s32 %limit0, %t5, 24;
;;     and.b32 %limit0, %limit0, -4;
;;     mov.b32 %worst1, 0;
;;     cvt.u32.u64 %base1, %start2;
;;     cvt.u32.u64 %t6, %size2;
;;     sub.s32 %limit1, %t6, 4;
;;     and.b32 %limit1, %limit1, -4;
;;     mov.b32 %r3, 0;
;;     mov.b32 %r4, 2;
;;     and.b32 %t0, %r4, 31;
;;     shl.b32 %r5, %r0, %t0;
;;     add.s32 %r6, %r1, %r5;
;;     add.s32 %t1, %r5, 0;
;;     max.u32 %worst0, %worst0, %t1;
;;     min.u32 %t1, %t1, %limit0;
;;     cvt.u64.u32 %u0, %t1;
;;     add.s64 %u0, %u0, %window1;
;;     ld.global.f32 %f7, [%u0+0];
;;     ld.global.f32 %f8, [%u0+8];
;;     ld.global.f32 %f9, [%u0+20];
;;     add.rn.f32 %f10, %f8, %f9;
;;     add.rn.f32 %f11, %f7, %f10;
;;     setp.nan.f32 %q0, %f11, %f11;
;;     selp.f32 %f12, 0f7FC00000, %f11, %q0;
;;     sub.s32 %t2, %r2, %base1;
;;     max.u32 %worst1, %worst1, %t2;
;;     min.u32 %t2, %t2, %limit1;
;;     cvt.u64.u32 %u1, %t2;
;;     add.s64 %u1, %u1, %window2;
;;     st.global.f32 [%u1], %f12;
;; L1:
;;     setp.gt.u32 %q1, %worst0, %limit0;
;;     @%q1 bra BAD_0;
;;     setp.gt.u32 %q2, %worst1, %limit1;
;;     @%q2 bra BAD_1;
;;     ret;

;; Where addresses come from: `p + i` is clamped into the window of `p`, and so is `q + (p - q)`. What comes from memory
;; is looked up among all windows.
(module
  (memory 1)
  (func (export "k") (param $i i32) (param $p i32) (param $q i32)
    (f32.store (i32.add (local.get $q) (local.get $i)) (f32.load (i32.add (local.get $p) (local.get $i))))
    (f32.store offset=64 (i32.add (local.get $q) (i32.sub (local.get $p) (local.get $q))) (f32.const 1))
    (i32.store8 (i32.load (local.get $q)) (i32.const 1))))

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
;;     ld.param.u32 %t6, [size1];
;;     cvt.u64.u32 %size1, %t6;
;;     ld.param.u64 %window2, [window2];
;;     ld.param.u32 %r2, [start2];
;;     cvt.u64.u32 %start2, %r2;
;;     ld.param.u32 %t7, [size2];
;;     cvt.u64.u32 %size2, %t7;
;;     mov.b32 %worst0, 0;
;;     cvt.u32.u64 %base0, %start1;
;;     cvt.u32.u64 %t8, %size1;
;;     sub.s32 %limit0, %t8, 4;
;;     mov.b32 %worst1, 0;
;;     cvt.u32.u64 %base1, %start2;
;;     cvt.u32.u64 %t9, %size2;
;;     sub.s32 %limit1, %t9, 4;
;;     mov.b32 %worst2, 0;
;;     cvt.u32.u64 %base2, %start1;
;;     cvt.u32.u64 %t10, %size1;
;;     sub.s32 %limit2, %t10, 4;
;;     and.b32 %limit2, %limit2, -4;
;;     mov.b32 %worst3, 0;
;;     cvt.u32.u64 %base3, %start2;
;;     cvt.u32.u64 %t11, %size2;
;;     sub.s32 %limit3, %t11, 4;
;;     and.b32 %limit3, %limit3, -4;
;;     add.s32 %r3, %r2, %r0;
;;     add.s32 %r4, %r1, %r0;
;;     add.s32 %t0, %r0, 0;
;;     max.u32 %worst0, %worst0, %t0;
;;     min.u32 %t0, %t0, %limit0;
;;     cvt.u64.u32 %u0, %t0;
;;     add.s64 %u0, %u0, %window1;
;;     and.b64 %u1, %u0, 3;
;;     setp.ne.s64 %q0, %u1, 0;
;;     @%q0 bra U1;
;;     ld.global.f32 %f5, [%u0];
;; V1:
;;     add.s32 %t2, %r0, 0;
;;     max.u32 %worst1, %worst1, %t2;
;;     min.u32 %t2, %t2, %limit1;
;;     cvt.u64.u32 %u4, %t2;
;;     add.s64 %u4, %u4, %window2;
;;     and.b64 %u5, %u4, 3;
;;     setp.ne.s64 %q1, %u5, 0;
;;     @%q1 bra U2;
;;     st.global.f32 [%u4], %f5;
;; V2:
;;     sub.s32 %r6, %r1, %r2;
;;     add.s32 %r7, %r2, %r6;
;;     mov.f32 %f8, 0f3F800000;
;;     add.s32 %t4, %r7, 64;
;;     sub.s32 %t4, %t4, %base2;
;;     max.u32 %worst2, %worst2, %t4;
;;     min.u32 %t4, %t4, %limit2;
;;     cvt.u64.u32 %u7, %t4;
;;     add.s64 %u7, %u7, %window1;
;;     st.global.f32 [%u7], %f8;
;;     sub.s32 %t5, %r2, %base3;
;;     max.u32 %worst3, %worst3, %t5;
;;     min.u32 %t5, %t5, %limit3;
;;     cvt.u64.u32 %u8, %t5;
;;     add.s64 %u8, %u8, %window2;
;;     ld.global.u32 %r9, [%u8];
;;     mov.b32 %r10, 1;
;;     cvt.u64.u32 %u9, %r9;
;;     mov.b64 %u10, 0;
;;     sub.s64 %u11, %u9, %start1;
;;     add.s64 %u12, %u11, 1;
;;     setp.lt.u64 %q2, %u11, %size1;
;;     setp.le.and.u64 %q2, %u12, %size1, %q2;
;;     add.s64 %u13, %window1, %u11;
;;     selp.b64 %u10, %u13, %u10, %q2;
;;     sub.s64 %u14, %u9, %start2;
;;     add.s64 %u15, %u14, 1;
;;     setp.lt.u64 %q3, %u14, %size2;
;;     setp.le.and.u64 %q3, %u15, %size2, %q3;
;;     add.s64 %u16, %window2, %u14;
;;     selp.b64 %u10, %u16, %u10, %q3;
;;     setp.eq.s64 %q4, %u10, 0;
;;     @%q4 bra TRAP_0;
;;     st.u8 [%u10], %r10;
;; L1:
;;     setp.gt.u32 %q5, %worst0, %limit0;
;;     @%q5 bra BAD_0;
;;     setp.gt.u32 %q6, %worst1, %limit1;
;;     @%q6 bra BAD_1;
;;     setp.gt.u32 %q7, %worst2, %limit2;
;;     @%q7 bra BAD_2;
;;     setp.gt.u32 %q8, %worst3, %limit3;
;;     @%q8 bra BAD_3;
;;     ret;

;; Checks before counted loops: whether all the rounds stay inside the window is looked at once, and if so a copy of the
;; loop runs that has neither a fence nor fuel.
(module
  (memory 1)
  (func (export "k") (param $n i32) (param $p i32) (param $out i32) (local $i i32) (local $sum f32)
    (loop $l
      (local.set $sum (f32.add (local.get $sum) (f32.load (local.get $p))))
      (local.set $p (i32.add (local.get $p) (i32.const 4)))
      (br_if $l (i32.ne (local.tee $i (i32.add (local.get $i) (i32.const 1))) (local.get $n))))
    (f32.store (local.get $out) (local.get $sum))))

;; The PTX, without declarations, polls and traps:
;;     mov.b32 %r3, 0;
;;     mov.f32 %f4, 0f00000000;
;;     mov.b32 %r5, %r1;
;;     mov.b32 %r6, %r3;
;;     mov.f32 %f7, %f4;
;;     setp.eq.u64 %q0, %stop, %launch;
;;     @%q0 bra STOPPED;
;;     sub.s32 %t0, %r0, %r6;
;;     shr.u32 %t1, %t0, 0;
;;     setp.ge.u32 %q1, %t1, 4;
;;     setp.le.and.u32 %q1, %t1, 18724, %q1;
;;     mov.b32 %t2, 0;
;;     add.s32 %t2, %t2, %r5;
;;     cvt.u32.u64 %t4, %start1;
;;     sub.s32 %t2, %t2, %t4;
;;     add.s32 %t2, %t2, 0;
;;     cvt.u64.u32 %u1, %t2;
;;     mov.b64 %u3, 4;
;;     sub.s32 %t3, %t1, 1;
;;     cvt.u64.u32 %u0, %t3;
;;     mul.lo.s64 %u0, %u0, %u3;
;;     add.s64 %u0, %u0, %u1;
;;     add.s64 %u2, %u1, 4;
;;     setp.le.and.u64 %q1, %u1, %size1, %q1;
;;     setp.le.and.u64 %q1, %u2, %size1, %q1;
;;     add.s64 %u2, %u0, 4;
;;     setp.le.and.u64 %q1, %u0, %size1, %q1;
;;     setp.le.and.u64 %q1, %u2, %size1, %q1;
;;     add.s64 %u1, %u1, %window1;
;;     @!%q1 bra L2;
;;     mul.lo.s32 %t5, %t1, 14;
;;     sub.s32 %fuel, %fuel, %t5;
;;     setp.le.s32 %q2, %fuel, 0;
;;     @%q2 bra P1;
;; F2:
;;     mov.b32 %t6, %t1;
;; G2:
;;     ld.global.f32 %f8, [%u1+0];
;;     add.rn.f32 %f9, %f7, %f8;
;;     mov.b32 %r10, 4;
;;     add.s32 %r11, %r5, %r10;
;;     mov.b32 %r12, 1;
;;     add.s32 %r13, %r6, %r12;
;;     setp.ne.s32 %q4, %r13, %r0;
;;     selp.b32 %r14, 1, 0, %q4;
;;     mov.b32 %r5, %r11;
;;     mov.b32 %r6, %r13;
;;     mov.f32 %f7, %f9;
;;     add.s64 %u1, %u1, 4;
;;     ld.global.f32 %f8, [%u1+0];
;;     add.rn.f32 %f9, %f7, %f8;
;;     mov.b32 %r10, 4;
;;     add.s32 %r11, %r5, %r10;
;;     mov.b32 %r12, 1;
;;     add.s32 %r13, %r6, %r12;
;;     setp.ne.s32 %q5, %r13, %r0;
;;     selp.b32 %r14, 1, 0, %q5;
;;     mov.b32 %r5, %r11;
;;     mov.b32 %r6, %r13;
;;     mov.f32 %f7, %f9;
;;     add.s64 %u1, %u1, 4;
;;     ld.global.f32 %f8, [%u1+0];
;;     add.rn.f32 %f9, %f7, %f8;
;;     mov.b32 %r10, 4;
;;     add.s32 %r11, %r5, %r10;
;;     mov.b32 %r12, 1;
;;     add.s32 %r13, %r6, %r12;
;;     setp.ne.s32 %q6, %r13, %r0;
;;     selp.b32 %r14, 1, 0, %q6;
;;     mov.b32 %r5, %r11;
;;     mov.b32 %r6, %r13;
;;     mov.f32 %f7, %f9;
;;     add.s64 %u1, %u1, 4;
;;     ld.global.f32 %f8, [%u1+0];
;;     add.rn.f32 %f9, %f7, %f8;
;;     mov.b32 %r10, 4;
;;     add.s32 %r11, %r5, %r10;
;;     mov.b32 %r12, 1;
;;     add.s32 %r13, %r6, %r12;
;;     setp.ne.s32 %q7, %r13, %r0;
;;     selp.b32 %r14, 1, 0, %q7;
;;     sub.s32 %t6, %t6, 4;
;;     setp.eq.s32 %q2, %t6, 0;
;;     @%q2 bra D2;
;;     mov.b32 %r5, %r11;
;;     mov.b32 %r6, %r13;
;;     mov.f32 %f7, %f9;
;;     add.s64 %u1, %u1, 4;
;;     setp.ge.s32 %q2, %t6, 4;
;;     @%q2 bra G2;
;; L2:
;;     sub.s32 %t11, %r5, %base0;
;;     max.u32 %worst0, %worst0, %t11;
;;     min.u32 %t11, %t11, %limit0;
;;     cvt.u64.u32 %u8, %t11;
;;     add.s64 %u8, %u8, %window1;
;;     ld.global.f32 %f8, [%u8];
;;     add.rn.f32 %f9, %f7, %f8;
;;     mov.b32 %r10, 4;
;;     add.s32 %r11, %r5, %r10;
;;     mov.b32 %r12, 1;
;;     add.s32 %r13, %r6, %r12;
;;     setp.ne.s32 %q8, %r13, %r0;
;;     selp.b32 %r14, 1, 0, %q8;
;;     setp.ne.s32 %q9, %r14, 0;
;;     @!%q9 bra L3;
;;     mov.b32 %r5, %r11;
;;     mov.b32 %r6, %r13;
;;     mov.f32 %f7, %f9;
;;     sub.s32 %fuel, %fuel, 12;
;;     setp.gt.s32 %q11, %fuel, 0;
;;     @%q11 bra L2;
;;     bra P3;
;; L3:
;; D2:
;;     setp.nan.f32 %q12, %f9, %f9;
;;     selp.f32 %f15, 0f7FC00000, %f9, %q12;
;;     sub.s32 %t16, %r2, %base1;
;;     max.u32 %worst1, %worst1, %t16;
;;     min.u32 %t16, %t16, %limit1;
;;     cvt.u64.u32 %u13, %t16;
;;     add.s64 %u13, %u13, %window2;
;;     st.global.f32 [%u13], %f15;
;; L1:
;;     setp.gt.u32 %q15, %worst0, %limit0;
;;     @%q15 bra BAD_0;
;;     setp.gt.u32 %q16, %worst1, %limit1;
;;     @%q16 bra BAD_1;
;;     ret;

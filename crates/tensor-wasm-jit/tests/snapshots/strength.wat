;; Addresses in counted loops: `p + (i << 2)` and `q + j * stride` are pointers of the device to which something is
;; added each round.
(module
  (memory 1)
  (func (export "k") (param $n i32) (param $stride i32) (param $p i32) (param $q i32) (param $out i32)
    (local $i i32) (local $at i32) (local $sum f32)
    (local.set $at (local.get $q))
    (loop $l
      (local.set $sum
        (f32.add (local.get $sum)
          (f32.mul (f32.load (i32.add (local.get $p) (i32.shl (local.get $i) (i32.const 2)))) (f32.load (local.get $at)))))
      (local.set $at (i32.add (local.get $at) (local.get $stride)))
      (br_if $l (i32.ne (local.tee $i (i32.add (local.get $i) (i32.const 1))) (local.get $n))))
    (f32.store (local.get $out) (local.get $sum))))

;; The PTX, without declarations, polls and traps:
;;     mov.b32 %r5, 0;
;;     mov.f32 %f6, 0f00000000;
;;     mov.b32 %r7, %r5;
;;     mov.b32 %r8, %r3;
;;     mov.f32 %f9, %f6;
;;     setp.eq.u64 %q0, %stop, %launch;
;;     @%q0 bra STOPPED;
;;     sub.s32 %t0, %r0, %r7;
;;     shr.u32 %t1, %t0, 0;
;;     setp.ge.u32 %q1, %t1, 4;
;;     setp.le.and.u32 %q1, %t1, 14563, %q1;
;;     mov.b32 %t2, 0;
;;     add.s32 %t2, %t2, %r2;
;;     mov.b32 %t4, %r7;
;;     shl.b32 %t4, %t4, 2;
;;     add.s32 %t2, %t2, %t4;
;;     cvt.u32.u64 %t5, %start2;
;;     sub.s32 %t2, %t2, %t5;
;;     add.s32 %t2, %t2, 0;
;;     cvt.u64.u32 %u1, %t2;
;;     mov.b64 %u3, 4;
;;     sub.s32 %t3, %t1, 1;
;;     cvt.u64.u32 %u0, %t3;
;;     mul.lo.s64 %u0, %u0, %u3;
;;     add.s64 %u0, %u0, %u1;
;;     add.s64 %u2, %u1, 4;
;;     setp.le.and.u64 %q1, %u1, %size2, %q1;
;;     setp.le.and.u64 %q1, %u2, %size2, %q1;
;;     add.s64 %u2, %u0, 4;
;;     setp.le.and.u64 %q1, %u0, %size2, %q1;
;;     setp.le.and.u64 %q1, %u2, %size2, %q1;
;;     add.s64 %u1, %u1, %window2;
;;     @!%q1 bra L2;
;;     mul.lo.s32 %t6, %t1, 18;
;;     sub.s32 %fuel, %fuel, %t6;
;;     setp.le.s32 %q2, %fuel, 0;
;;     @%q2 bra P1;
;; F2:
;;     mov.b32 %t7, %t1;
;; G2:
;;     mov.b32 %r10, 2;
;;     and.b32 %t12, %r10, 31;
;;     shl.b32 %r11, %r7, %t12;
;;     add.s32 %r12, %r2, %r11;
;;     ld.global.f32 %f13, [%u1+0];
;;     cvt.u64.u32 %u8, %r8;
;;     mov.b64 %u9, 0;
;;     sub.s64 %u10, %u8, %start2;
;;     add.s64 %u11, %u10, 4;
;;     setp.lt.u64 %q4, %u10, %size2;
;;     setp.le.and.u64 %q4, %u11, %size2, %q4;
;;     add.s64 %u12, %window2, %u10;
;;     selp.b64 %u9, %u12, %u9, %q4;
;;     sub.s64 %u13, %u8, %start4;
;;     add.s64 %u14, %u13, 4;
;;     setp.lt.u64 %q5, %u13, %size4;
;;     setp.le.and.u64 %q5, %u14, %size4, %q5;
;;     add.s64 %u15, %window4, %u13;
;;     selp.b64 %u9, %u15, %u9, %q5;
;;     setp.eq.s64 %q6, %u9, 0;
;;     @%q6 bra TRAP_0;
;;     and.b64 %u16, %u9, 3;
;;     setp.ne.s64 %q7, %u16, 0;
;;     @%q7 bra U3;
;;     ld.f32 %f14, [%u9];
;; V3:
;;     mul.rn.f32 %f15, %f13, %f14;
;;     add.rn.f32 %f16, %f9, %f15;
;;     add.s32 %r17, %r8, %r1;
;;     mov.b32 %r18, 1;
;;     add.s32 %r19, %r7, %r18;
;;     setp.ne.s32 %q8, %r19, %r0;
;;     selp.b32 %r20, 1, 0, %q8;
;;     mov.b32 %r7, %r19;
;;     mov.b32 %r8, %r17;
;;     mov.f32 %f9, %f16;
;;     add.s64 %u1, %u1, 4;
;;     mov.b32 %r10, 2;
;;     and.b32 %t14, %r10, 31;
;;     shl.b32 %r11, %r7, %t14;
;;     add.s32 %r12, %r2, %r11;
;;     ld.global.f32 %f13, [%u1+0];
;;     cvt.u64.u32 %u19, %r8;
;;     mov.b64 %u20, 0;
;;     sub.s64 %u21, %u19, %start2;
;;     add.s64 %u22, %u21, 4;
;;     setp.lt.u64 %q9, %u21, %size2;
;;     setp.le.and.u64 %q9, %u22, %size2, %q9;
;;     add.s64 %u23, %window2, %u21;
;;     selp.b64 %u20, %u23, %u20, %q9;
;;     sub.s64 %u24, %u19, %start4;
;;     add.s64 %u25, %u24, 4;
;;     setp.lt.u64 %q10, %u24, %size4;
;;     setp.le.and.u64 %q10, %u25, %size4, %q10;
;;     add.s64 %u26, %window4, %u24;
;;     selp.b64 %u20, %u26, %u20, %q10;
;;     setp.eq.s64 %q11, %u20, 0;
;;     @%q11 bra TRAP_0;
;;     and.b64 %u27, %u20, 3;
;;     setp.ne.s64 %q12, %u27, 0;
;;     @%q12 bra U4;
;;     ld.f32 %f14, [%u20];
;; V4:
;;     mul.rn.f32 %f15, %f13, %f14;
;;     add.rn.f32 %f16, %f9, %f15;
;;     add.s32 %r17, %r8, %r1;
;;     mov.b32 %r18, 1;
;;     add.s32 %r19, %r7, %r18;
;;     setp.ne.s32 %q13, %r19, %r0;
;;     selp.b32 %r20, 1, 0, %q13;
;;     mov.b32 %r7, %r19;
;;     mov.b32 %r8, %r17;
;;     mov.f32 %f9, %f16;
;;     add.s64 %u1, %u1, 4;
;;     mov.b32 %r10, 2;
;;     and.b32 %t16, %r10, 31;
;;     shl.b32 %r11, %r7, %t16;
;;     add.s32 %r12, %r2, %r11;
;;     ld.global.f32 %f13, [%u1+0];
;;     cvt.u64.u32 %u30, %r8;
;;     mov.b64 %u31, 0;
;;     sub.s64 %u32, %u30, %start2;
;;     add.s64 %u33, %u32, 4;
;;     setp.lt.u64 %q14, %u32, %size2;
;;     setp.le.and.u64 %q14, %u33, %size2, %q14;
;;     add.s64 %u34, %window2, %u32;
;;     selp.b64 %u31, %u34, %u31, %q14;
;;     sub.s64 %u35, %u30, %start4;
;;     add.s64 %u36, %u35, 4;
;;     setp.lt.u64 %q15, %u35, %size4;
;;     setp.le.and.u64 %q15, %u36, %size4, %q15;
;;     add.s64 %u37, %window4, %u35;
;;     selp.b64 %u31, %u37, %u31, %q15;
;;     setp.eq.s64 %q16, %u31, 0;
;;     @%q16 bra TRAP_0;
;;     and.b64 %u38, %u31, 3;
;;     setp.ne.s64 %q17, %u38, 0;
;;     @%q17 bra U5;
;;     ld.f32 %f14, [%u31];
;; V5:
;;     mul.rn.f32 %f15, %f13, %f14;
;;     add.rn.f32 %f16, %f9, %f15;
;;     add.s32 %r17, %r8, %r1;
;;     mov.b32 %r18, 1;
;;     add.s32 %r19, %r7, %r18;
;;     setp.ne.s32 %q18, %r19, %r0;
;;     selp.b32 %r20, 1, 0, %q18;
;;     mov.b32 %r7, %r19;
;;     mov.b32 %r8, %r17;
;;     mov.f32 %f9, %f16;
;;     add.s64 %u1, %u1, 4;
;;     mov.b32 %r10, 2;
;;     and.b32 %t18, %r10, 31;
;;     shl.b32 %r11, %r7, %t18;
;;     add.s32 %r12, %r2, %r11;
;;     ld.global.f32 %f13, [%u1+0];
;;     cvt.u64.u32 %u41, %r8;
;;     mov.b64 %u42, 0;
;;     sub.s64 %u43, %u41, %start2;
;;     add.s64 %u44, %u43, 4;
;;     setp.lt.u64 %q19, %u43, %size2;
;;     setp.le.and.u64 %q19, %u44, %size2, %q19;
;;     add.s64 %u45, %window2, %u43;
;;     selp.b64 %u42, %u45, %u42, %q19;
;;     sub.s64 %u46, %u41, %start4;
;;     add.s64 %u47, %u46, 4;
;;     setp.lt.u64 %q20, %u46, %size4;
;;     setp.le.and.u64 %q20, %u47, %size4, %q20;
;;     add.s64 %u48, %window4, %u46;
;;     selp.b64 %u42, %u48, %u42, %q20;
;;     setp.eq.s64 %q21, %u42, 0;
;;     @%q21 bra TRAP_0;
;;     and.b64 %u49, %u42, 3;
;;     setp.ne.s64 %q22, %u49, 0;
;;     @%q22 bra U6;
;;     ld.f32 %f14, [%u42];
;; V6:
;;     mul.rn.f32 %f15, %f13, %f14;
;;     add.rn.f32 %f16, %f9, %f15;
;;     add.s32 %r17, %r8, %r1;
;;     mov.b32 %r18, 1;
;;     add.s32 %r19, %r7, %r18;
;;     setp.ne.s32 %q23, %r19, %r0;
;;     selp.b32 %r20, 1, 0, %q23;
;;     sub.s32 %t7, %t7, 4;
;;     setp.eq.s32 %q2, %t7, 0;
;;     @%q2 bra D2;
;;     mov.b32 %r7, %r19;
;;     mov.b32 %r8, %r17;
;;     mov.f32 %f9, %f16;
;;     add.s64 %u1, %u1, 4;
;;     setp.ge.s32 %q2, %t7, 4;
;;     @%q2 bra G2;
;; L2:
;;     mov.b32 %r10, 2;
;;     and.b32 %t20, %r10, 31;
;;     shl.b32 %r11, %r7, %t20;
;;     add.s32 %r12, %r2, %r11;
;;     add.s32 %t21, %r11, 0;
;;     max.u32 %worst0, %worst0, %t21;
;;     min.u32 %t21, %t21, %limit0;
;;     cvt.u64.u32 %u52, %t21;
;;     add.s64 %u52, %u52, %window2;
;;     ld.global.f32 %f13, [%u52];
;;     cvt.u64.u32 %u53, %r8;
;;     mov.b64 %u54, 0;
;;     sub.s64 %u55, %u53, %start2;
;;     add.s64 %u56, %u55, 4;
;;     setp.lt.u64 %q24, %u55, %size2;
;;     setp.le.and.u64 %q24, %u56, %size2, %q24;
;;     add.s64 %u57, %window2, %u55;
;;     selp.b64 %u54, %u57, %u54, %q24;
;;     sub.s64 %u58, %u53, %start4;
;;     add.s64 %u59, %u58, 4;
;;     setp.lt.u64 %q25, %u58, %size4;
;;     setp.le.and.u64 %q25, %u59, %size4, %q25;
;;     add.s64 %u60, %window4, %u58;
;;     selp.b64 %u54, %u60, %u54, %q25;
;;     setp.eq.s64 %q26, %u54, 0;
;;     @%q26 bra TRAP_0;
;;     and.b64 %u61, %u54, 3;
;;     setp.ne.s64 %q27, %u61, 0;
;;     @%q27 bra U7;
;;     ld.f32 %f14, [%u54];
;; V7:
;;     mul.rn.f32 %f15, %f13, %f14;
;;     add.rn.f32 %f16, %f9, %f15;
;;     add.s32 %r17, %r8, %r1;
;;     mov.b32 %r18, 1;
;;     add.s32 %r19, %r7, %r18;
;;     setp.ne.s32 %q28, %r19, %r0;
;;     selp.b32 %r20, 1, 0, %q28;
;;     setp.ne.s32 %q29, %r20, 0;
;;     @!%q29 bra L3;
;;     mov.b32 %r7, %r19;
;;     mov.b32 %r8, %r17;
;;     mov.f32 %f9, %f16;
;;     sub.s32 %fuel, %fuel, 16;
;;     setp.gt.s32 %q31, %fuel, 0;
;;     @%q31 bra L2;
;;     bra P8;
;; L3:
;; D2:
;;     setp.nan.f32 %q32, %f16, %f16;
;;     selp.f32 %f21, 0f7FC00000, %f16, %q32;
;;     sub.s32 %t27, %r4, %base1;
;;     max.u32 %worst1, %worst1, %t27;
;;     min.u32 %t27, %t27, %limit1;
;;     cvt.u64.u32 %u68, %t27;
;;     add.s64 %u68, %u68, %window4;
;;     st.global.f32 [%u68], %f21;
;; L1:
;;     setp.gt.u32 %q35, %worst0, %limit0;
;;     @%q35 bra BAD_0;
;;     setp.gt.u32 %q36, %worst1, %limit1;
;;     @%q36 bra BAD_1;
;;     ret;

;; Spin: see `spin.rs`. A kernel has no clock: it counts, so many rounds for each microsecond, as an H200 does
;; them; on another device it takes another time.
(module
  (memory 1)
  (func (export "handle") (param $state i32) (param $message i32) (param $outbox i32)
    (local $x i32) (local $rounds i64)
    (if (i32.ne (i32.and (i32.load offset=28 (local.get $message)) (i32.const 0xff06ffff)) (i32.const 0x04000001)) (then
      (i32.store offset=4 (local.get $outbox) (i32.const -1))
      (return)))
    (local.set $rounds (i64.mul (i64.load32_u offset=32 (local.get $message)) (i64.const 12)))
    (block $done (loop $again
      (br_if $done (i64.eqz (local.get $rounds)))
      (local.set $x (i32.add (i32.mul (local.get $x) (i32.const 1664525)) (i32.wrap_i64 (local.get $rounds))))
      (local.set $rounds (i64.sub (local.get $rounds) (i64.const 1)))
      (br $again)))
    ;; The rounds have a result, and so are not left out.
    (i32.store offset=104 (local.get $outbox) (local.get $x))
    (i32.store (local.get $outbox) (i32.const 1))
    (i32.store offset=44 (local.get $outbox) (i32.const 0x04000001))
    (i32.store offset=48 (local.get $outbox) (i32.load offset=32 (local.get $message)))))

;; Counter: see `counter.rs`. 1 adds and 2 asks; both are answered by 3. A sum that does not fit is a trap, number 2.
(module
  (memory 1)
  (func (export "handle") (param $state i32) (param $message i32) (param $outbox i32)
    (local $what i32) (local $old i64) (local $new i64)
    (local.set $what (i32.and (i32.load offset=28 (local.get $message)) (i32.const 0xff06ffff)))
    (local.set $old (i64.load (local.get $state)))
    (local.set $new (local.get $old))
    (if (i32.eq (local.get $what) (i32.const 0x08000001))
      (then
        (local.set $new (i64.add (local.get $old) (i64.load offset=32 (local.get $message))))
        (if (i64.lt_u (local.get $new) (local.get $old)) (then
          (i32.store offset=4 (local.get $outbox) (i32.const 2))
          (return))))
      (else (if (i32.ne (local.get $what) (i32.const 2)) (then
        (i32.store offset=4 (local.get $outbox) (i32.const -1))
        (return)))))
    (i64.store (local.get $state) (local.get $new))
    (i32.store (local.get $outbox) (i32.const 1))
    (i32.store offset=44 (local.get $outbox) (i32.const 0x08000003))
    (i64.store offset=48 (local.get $outbox) (local.get $new))))

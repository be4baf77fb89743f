;; Relay: see `relay.rs`. 1 says who comes next, 2 is a token, which ends as a 3.
(module
  (memory 1)
  (func (export "handle") (param $state i32) (param $message i32) (param $outbox i32)
    (local $what i32) (local $hops i32) (local $next i32)
    (local.set $what (i32.and (i32.load offset=28 (local.get $message)) (i32.const 0xff06ffff)))
    (local.set $next (i32.load (local.get $state)))
    (i32.store (local.get $outbox) (i32.const 1))
    (if (i32.eq (local.get $what) (i32.const 0x04000001)) (then
      (i32.store (local.get $state) (i32.load offset=32 (local.get $message)))
      (i32.store offset=44 (local.get $outbox) (i32.const 0x04000001))
      (i32.store offset=48 (local.get $outbox) (i32.load offset=32 (local.get $message)))
      (return)))
    (if (i32.eq (local.get $what) (i32.const 0x10000002)) (then
      (local.set $hops (i32.load offset=32 (local.get $message)))
      (if (i32.eqz (local.get $hops)) (then
        (i32.store offset=40 (local.get $outbox) (i32.load offset=36 (local.get $message)))
        (i32.store offset=44 (local.get $outbox) (i32.const 0x08000003))
        (i64.store offset=48 (local.get $outbox) (i64.load offset=40 (local.get $message)))
        (return)))
      (if (local.get $next) (then
        (i32.store offset=40 (local.get $outbox) (local.get $next))
        (i32.store offset=44 (local.get $outbox) (i32.const 0x10000002))
        (i32.store offset=48 (local.get $outbox) (i32.sub (local.get $hops) (i32.const 1)))
        (i32.store offset=52 (local.get $outbox) (i32.load offset=36 (local.get $message)))
        (i64.store offset=56 (local.get $outbox) (i64.load offset=40 (local.get $message)))
        (return)))))
    (i32.store offset=4 (local.get $outbox) (i32.const -1))))

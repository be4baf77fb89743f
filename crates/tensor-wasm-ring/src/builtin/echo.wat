;; Echo: answers every message with its own kind and payload.
(module
  (memory 1)
  (func (export "handle") (param $state i32) (param $message i32) (param $outbox i32) (local $at i32)
    (i32.store (local.get $outbox) (i32.const 1))
    ;; Kind and length as they are; of the flags that the payload is a reference.
    (i32.store offset=44 (local.get $outbox)
      (i32.and (i32.load offset=28 (local.get $message)) (i32.const 0xff02ffff)))
    (i64.store offset=48 (local.get $outbox) (i64.load offset=32 (local.get $message)))
    (i64.store offset=56 (local.get $outbox) (i64.load offset=40 (local.get $message)))
    (i64.store offset=64 (local.get $outbox) (i64.load offset=48 (local.get $message)))
    (i64.store offset=72 (local.get $outbox) (i64.load offset=56 (local.get $message)))
    (i64.store offset=80 (local.get $outbox) (i64.load offset=64 (local.get $message)))
    (i64.store offset=88 (local.get $outbox) (i64.load offset=72 (local.get $message)))
    (i64.store offset=96 (local.get $outbox) (i64.load offset=80 (local.get $message)))
    (i64.store offset=104 (local.get $outbox) (i64.load offset=88 (local.get $message)))))

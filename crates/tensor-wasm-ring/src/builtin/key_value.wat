;; Key-value: see `key_value.rs`. Entries of 64 bytes: key, mark (0 never used, 1 used, 2 used before), length, value.
(module
  (memory 1)
  (func $refuse (param $outbox i32)
    (i32.store offset=4 (local.get $outbox) (i32.const -1)))
  (func (export "handle") (param $state i32) (param $message i32) (param $outbox i32)
    (local $kind i32) (local $length i32) (local $key i64) (local $entries i32) (local $at i32) (local $left i32)
    (local $entry i32) (local $found i32) (local $room i32) (local $mark i32) (local $n i32)
    (local.set $kind (i32.load16_u offset=28 (local.get $message)))
    (local.set $length (i32.sub (i32.load8_u offset=31 (local.get $message)) (i32.const 8)))
    (local.set $key (i64.load offset=32 (local.get $message)))
    ;; The lane says how large the state is.
    (local.set $entries (i32.shr_u (i32.load offset=8 (local.get $outbox)) (i32.const 6)))
    (if (i32.eqz (local.get $entries)) (then (call $refuse (local.get $outbox)) (return)))
    (if (i32.gt_u (local.get $length) (i32.const 48)) (then (call $refuse (local.get $outbox)) (return)))
    (if (i32.and (i32.ne (local.get $kind) (i32.const 1)) (i32.ne (local.get $length) (i32.const 0))) (then
      (call $refuse (local.get $outbox)) (return)))
    (if (i32.gt_u (i32.sub (local.get $kind) (i32.const 1)) (i32.const 2)) (then
      (call $refuse (local.get $outbox)) (return)))
    ;; Where the key is, and where it could be put: linear probing, from where its hash says.
    (local.set $at (i32.wrap_i64 (i64.rem_u
      (i64.shr_u (i64.mul (local.get $key) (i64.const 0x9e3779b97f4a7c15)) (i64.const 32))
      (i64.extend_i32_u (local.get $entries)))))
    (local.set $left (local.get $entries))
    (block $probed (loop $probe
      (br_if $probed (i32.eqz (local.get $left)))
      (local.set $entry (i32.add (local.get $state) (i32.shl (local.get $at) (i32.const 6))))
      (local.set $mark (i32.load offset=8 (local.get $entry)))
      (if (i32.eq (local.get $mark) (i32.const 1))
        (then
          (if (i64.eq (i64.load (local.get $entry)) (local.get $key)) (then
            (local.set $found (local.get $entry))
            (br $probed))))
        (else
          (if (i32.eqz (local.get $room)) (then (local.set $room (local.get $entry))))
          (br_if $probed (i32.eqz (local.get $mark)))))
      (local.set $at (i32.add (local.get $at) (i32.const 1)))
      (if (i32.eq (local.get $at) (local.get $entries)) (then (local.set $at (i32.const 0))))
      (local.set $left (i32.sub (local.get $left) (i32.const 1)))
      (br $probe)))
    (i32.store (local.get $outbox) (i32.const 1))
    (if (i32.eq (local.get $kind) (i32.const 1)) (then
      (local.set $entry (select (local.get $found) (local.get $room) (local.get $found)))
      (if (local.get $entry) (then
        (i64.store (local.get $entry) (local.get $key))
        (i32.store offset=8 (local.get $entry) (i32.const 1))
        (i32.store offset=12 (local.get $entry) (local.get $length))
        ;; What is behind the value is zeros.
        (loop $byte
          (i32.store8 offset=16 (i32.add (local.get $entry) (local.get $n))
            (if (result i32) (i32.lt_u (local.get $n) (local.get $length))
              (then (i32.load8_u offset=40 (i32.add (local.get $message) (local.get $n))))
              (else (i32.const 0))))
          (local.set $n (i32.add (local.get $n) (i32.const 1)))
          (br_if $byte (i32.lt_u (local.get $n) (i32.const 48))))))
      (i32.store offset=44 (local.get $outbox) (i32.const 0x04000001))
      (i32.store offset=48 (local.get $outbox) (i32.ne (local.get $entry) (i32.const 0)))
      (return)))
    (if (i32.eq (local.get $kind) (i32.const 3)) (then
      (if (local.get $found) (then (i32.store offset=8 (local.get $found) (i32.const 2))))
      (i32.store offset=44 (local.get $outbox) (i32.const 0x04000003))
      (i32.store offset=48 (local.get $outbox) (i32.ne (local.get $found) (i32.const 0)))
      (return)))
    (if (i32.eqz (local.get $found)) (then
      (i32.store offset=44 (local.get $outbox) (i32.const 4))
      (return)))
    (local.set $length (i32.load offset=12 (local.get $found)))
    (i32.store offset=44 (local.get $outbox)
      (i32.or (i32.const 2) (i32.shl (local.get $length) (i32.const 24))))
    (loop $word
      (i64.store offset=48 (i32.add (local.get $outbox) (local.get $n))
        (i64.load offset=16 (i32.add (local.get $found) (local.get $n))))
      (local.set $n (i32.add (local.get $n) (i32.const 8)))
      (br_if $word (i32.lt_u (local.get $n) (i32.const 48))))))

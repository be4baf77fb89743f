//! Executors of actors in the emulator: a lane's PTX on one side, a host that feeds its mailbox and takes its replies
//! on the other, in memory that both see.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tensor_wasm_jit::actor::{self, ActorImage, ActorState, Control, Refused};
use tensor_wasm_jit::emulate::{DeviceMemory, Emulator, OtherMemory, ParamBlock};
use tensor_wasm_jit::{Program, TrapKind};

const ACTORS: u64 = 6;
const STATE_BYTES: u64 = 256;
const SLOTS_LOG2: u64 = 3;
const HOLD_LOG2: u64 = 2;
const INBOX_LOG2: u64 = 6;
const BASE: u64 = 0x10_0000;
const PORT: u32 = 0xff00_0007;

/// Adds what it is sent to its sum, and answers with the sum; passes on to the actor that it is told.
pub(super) const COUNTER: &str = r#"(module
  (memory 1)
  (func (export "handle") (param $state i32) (param $message i32) (param $outbox i32)
    (i64.store (local.get $state)
      (i64.add (i64.load (local.get $state)) (i64.load offset=32 (local.get $message))))
    (i32.store (local.get $outbox) (i32.const 1))
    (i32.store offset=40 (local.get $outbox) (i32.load offset=40 (local.get $message)))
    (i32.store16 offset=44 (local.get $outbox) (i32.load16_u offset=28 (local.get $message)))
    (i32.store8 offset=47 (local.get $outbox) (i32.const 8))
    (i64.store offset=48 (local.get $outbox) (i64.load (local.get $state)))))"#;

/// Does as the kind of the message says: 1 traps, 2 never ends, 3 writes outside of its state, 4 sends more than fits,
/// 5 reads outside of its message, 6 sends what is too long, 7 fails as it says itself, 8 refuses.
pub(super) const HOSTILE: &str = r#"(module
  (memory 1)
  (func (export "handle") (param $state i32) (param $message i32) (param $outbox i32) (local $kind i32)
    (local.set $kind (i32.load16_u offset=28 (local.get $message)))
    (if (i32.eq (local.get $kind) (i32.const 1)) (then unreachable))
    (if (i32.eq (local.get $kind) (i32.const 2)) (then (loop $for_ever
      (i32.store (local.get $state) (i32.add (i32.load (local.get $state)) (i32.const 1)))
      (br $for_ever))))
    (if (i32.eq (local.get $kind) (i32.const 3)) (then (i32.store offset=256 (local.get $state) (i32.const 7))))
    (if (i32.eq (local.get $kind) (i32.const 4)) (then
      (i32.store (local.get $outbox) (i32.const -1))))
    (if (i32.eq (local.get $kind) (i32.const 6)) (then
      (i32.store (local.get $outbox) (i32.const 2))
      (i32.store8 offset=143 (local.get $outbox) (i32.const 65))))
    (if (i32.eq (local.get $kind) (i32.const 7)) (then (i32.store offset=4 (local.get $outbox) (i32.const 77))))
    (if (i32.eq (local.get $kind) (i32.const 8)) (then
      (i32.store (local.get $outbox) (i32.const 1))
      (i32.store offset=4 (local.get $outbox) (i32.const -1))))
    (if (i32.eq (local.get $kind) (i32.const 5)) (then
      (i32.store (local.get $state) (i32.load offset=96 (local.get $message)))))))"#;

/// Sixty-four items add up what is in the message, by way of shared memory, and the one whose number is the kind traps
/// between two barriers.
pub(super) const TOGETHER: &str = r#"(module
  (import "kernel" "local_id" (func $id (param i32) (result i32)))
  (import "kernel" "local_size" (func $size (param i32) (result i32)))
  (import "kernel" "barrier" (func $barrier))
  (import "kernel" "shared" (func $shared (param i32) (result i32)))
  (memory 1)
  (func (export "handle") (param $state i32) (param $message i32) (param $outbox i32)
    (local $i i32) (local $step i32) (local $at i32)
    (local.set $i (call $id (i32.const 0)))
    (local.set $at (i32.add (call $shared (i32.const 256)) (i32.shl (local.get $i) (i32.const 2))))
    (i32.store (local.get $at) (i32.load8_u offset=32 (i32.add (local.get $message) (local.get $i))))
    (call $barrier)
    (if (i32.eq (local.get $i) (i32.load16_u offset=28 (local.get $message))) (then unreachable))
    (local.set $step (i32.shr_u (call $size (i32.const 0)) (i32.const 1)))
    (loop $again
      (if (i32.lt_u (local.get $i) (local.get $step)) (then
        (i32.store (local.get $at) (i32.add (i32.load (local.get $at))
          (i32.load (i32.add (local.get $at) (i32.shl (local.get $step) (i32.const 2))))))))
      (call $barrier)
      (local.set $step (i32.shr_u (local.get $step) (i32.const 1)))
      (br_if $again (local.get $step)))
    (if (i32.eqz (local.get $i)) (then
      (i32.store (local.get $outbox) (i32.const 1))
      (i32.store8 offset=47 (local.get $outbox) (i32.const 4))
      (i32.store offset=48 (local.get $outbox) (i32.load (local.get $at)))))))"#;

pub(super) fn compiled(text: &str, items: u32) -> ActorImage {
    let wasm = wat::parse_str(text).unwrap();
    let image = Program::read(&wasm).unwrap().compile_actor("handle", items).unwrap();
    super::assemble_text(&image.name, &image.ptx, image.target);
    image
}

/// Memory that host and device see.
#[derive(Clone)]
struct Shared(Arc<Vec<AtomicU64>>);

impl Shared {
    fn word(&self, address: u64) -> Option<&AtomicU64> {
        self.0.get(usize::try_from(address.checked_sub(BASE)? / 8).ok()?)
    }
}

impl OtherMemory for Shared {
    fn read(&self, address: u64, bytes: &mut [u8]) -> bool {
        let Some(word) = self.word(address) else { return false };
        let from = usize::try_from(address % 8).unwrap();
        bytes.copy_from_slice(&word.load(Ordering::SeqCst).to_le_bytes()[from..from + bytes.len()]);
        true
    }

    fn write(&self, address: u64, bytes: &[u8]) -> bool {
        let Some(word) = self.word(address) else { return false };
        let from = usize::try_from(address % 8).unwrap();
        let put = |old: u64| {
            let mut whole = old.to_le_bytes();
            whole[from..from + bytes.len()].copy_from_slice(bytes);
            Some(u64::from_le_bytes(whole))
        };
        word.fetch_update(Ordering::SeqCst, Ordering::SeqCst, put).is_ok()
    }
}

/// A message as the host has it.
#[derive(Debug, Clone, PartialEq)]
struct Message {
    id: u64,
    about: u64,
    clock: u64,
    to: u32,
    kind: u16,
    flags: u32,
    payload: Vec<u8>,
}

impl Message {
    fn refusal(&self) -> Option<u32> {
        let word = u32::from_le_bytes(self.payload.get(..4)?.try_into().ok()?);
        (self.flags & actor::FLAG_FAULT != 0).then_some(word)
    }

    fn number(&self) -> u64 {
        u64::from_le_bytes(self.payload[..8].try_into().unwrap())
    }

    fn word(&self, n: usize) -> u32 {
        u32::from_le_bytes(self.payload[4 * n..][..4].try_into().unwrap())
    }
}

/// An executor in the emulator, on a thread of its own, and what its host keeps.
struct Executor {
    memory: Shared,
    lanes: u64,
    at: HashMap<&'static str, u64>,
    image: ActorImage,
    run: Option<std::thread::JoinHandle<Result<(), String>>>,
    /// By lane: slots written, and replies taken.
    written: Vec<u64>,
    taken: Vec<u64>,
    sequence: u64,
    got: Vec<Message>,
}

impl Executor {
    fn new(image: ActorImage, lanes: u64) -> Executor {
        let ring = u64::from(actor::SLOT_BYTES) << SLOTS_LOG2;
        let parts = [
            ("rings", lanes * (u64::from(actor::LANE_CONTROL_BYTES) + 2 * ring)),
            ("actors", ACTORS * u64::from(actor::ACTOR_BYTES)),
            ("telemetry", ACTORS * u64::from(actor::TELEMETRY_BYTES)),
            ("states", ACTORS * STATE_BYTES),
            ("lanes", lanes * u64::from(actor::LANE_STATE_BYTES)),
            ("inboxes", lanes * (u64::from(actor::SLOT_BYTES) << INBOX_LOG2)),
            ("holds", (ACTORS << HOLD_LOG2) * u64::from(actor::MESSAGE_BYTES)),
            ("words", 256),
        ];
        let (mut at, mut end) = (HashMap::new(), BASE);
        for (name, bytes) in parts {
            at.insert(name, end);
            end = (end + bytes).next_multiple_of(128);
        }
        let words = (0..(end - BASE) / 8).map(|_| AtomicU64::new(0)).collect();
        let (memory, count) = (Shared(Arc::new(words)), usize::try_from(lanes).unwrap());
        let executor = Executor {
            memory,
            lanes,
            at,
            image,
            run: None,
            written: vec![0; count],
            taken: vec![0; count],
            sequence: 0,
            got: Vec::new(),
        };
        for index in 0..ACTORS {
            let lane = index * u64::from(actor::ACTOR_BYTES) + u64::from(actor::ACTOR_LANE);
            executor.word("actors", lane).store(index % lanes, Ordering::SeqCst);
        }
        for lane in 0..lanes {
            let resuming = executor.at["lanes"]
                + lane * u64::from(actor::LANE_STATE_BYTES)
                + u64::from(actor::LANE_STATE_RESUMING);
            executor.memory.word(resuming).unwrap().store(u64::from(u32::MAX), Ordering::SeqCst);
        }
        executor
    }

    fn word(&self, part: &str, offset: u64) -> &AtomicU64 {
        self.memory.word(self.at[part] + offset).unwrap()
    }

    fn launch(&mut self) {
        self.word("words", 128).store(0, Ordering::SeqCst);
        let (image, memory, at, lanes) = (self.image.clone(), self.memory.clone(), self.at.clone(), self.lanes);
        self.run = Some(std::thread::spawn(move || {
            let emulator = Emulator::new(&image.ptx)?;
            // Groups of the emulator run one after the other: each lane is a launch of its own here.
            let mut params = ParamBlock::new(&emulator);
            for part in ["rings", "actors", "telemetry", "states", "lanes", "inboxes", "holds"] {
                params.set(part, at[part]);
            }
            params
                .set("budget_nanos", 2_000_000_000)
                .set("wall", 1_700_000_000_000_000_000)
                .set("state_bytes", STATE_BYTES)
                .set("state_stride", STATE_BYTES);
            params
                .set("actor_count", ACTORS)
                .set("mailbox_log2", SLOTS_LOG2)
                .set("replies_log2", SLOTS_LOG2)
                .set("inbox_log2", INBOX_LOG2);
            params.set("hold_log2", HOLD_LOG2).set("own_address", 3 << 24);
            params.set("beat", at["words"]).set("stop", at["words"] + 128);
            let params = params.bytes();
            let lanes = u32::try_from(lanes).unwrap();
            std::thread::scope(|scope| {
                let groups: Vec<_> = (0..lanes)
                    .map(|lane| {
                        let (emulator, params, memory) = (&emulator, &params, memory.clone());
                        scope.spawn(move || {
                            let mut memory = DeviceMemory::of(Box::new(memory));
                            emulator.run_group(
                                &mut memory,
                                params,
                                [lanes, 1, 1],
                                [image.group_items, 1, 1],
                                [lane, 0, 0],
                            )
                        })
                    })
                    .collect();
                groups.into_iter().try_for_each(|group| group.join().unwrap())
            })
        }));
    }

    fn leave(&mut self) {
        self.word("words", 128).store(1, Ordering::SeqCst);
        self.run.take().unwrap().join().unwrap().unwrap();
        assert!(self.word("words", 0).load(Ordering::SeqCst) > 0, "it has beaten");
    }

    /// Where a lane's mailbox begins; its replies follow.
    fn lane(&self, lane: u64) -> u64 {
        let control = u64::from(actor::LANE_CONTROL_BYTES);
        lane * (control + 2 * (u64::from(actor::SLOT_BYTES) << SLOTS_LOG2)) + control
    }

    /// Puts a message into the mailbox of its actor's lane; takes replies while that is full.
    fn post(&mut self, to: u32, kind: u16, flags: u32, about: u64, payload: &[u8]) -> u64 {
        self.sequence += 1;
        let id = u64::from(PORT) << 32 | self.sequence;
        let mut bytes = [0; 96];
        bytes[0..8].copy_from_slice(&id.to_le_bytes());
        bytes[8..16].copy_from_slice(&about.to_le_bytes());
        bytes[24..28].copy_from_slice(&to.to_le_bytes());
        let what = u32::from(kind) | flags | u32::try_from(payload.len()).unwrap() << 24;
        bytes[28..32].copy_from_slice(&what.to_le_bytes());
        bytes[32..32 + payload.len()].copy_from_slice(payload);
        let lane = u64::from(to & 0xff_ffff) % self.lanes;
        let until = Instant::now() + Duration::from_secs(20);
        let mailbox_taken = self.lane(lane) - u64::from(actor::LANE_CONTROL_BYTES - actor::LANE_MAILBOX_TAKEN);
        let own = usize::try_from(lane).unwrap();
        while self.written[own] - self.word("rings", mailbox_taken).load(Ordering::SeqCst) >= 1 << SLOTS_LOG2 {
            self.take();
            assert!(Instant::now() < until, "the mailbox stays full");
        }
        let position = self.written[own];
        self.written[own] += 1;
        let slot = self.lane(lane) + (position % (1 << SLOTS_LOG2)) * u64::from(actor::SLOT_BYTES);
        let tag = (position >> SLOTS_LOG2) % u64::from(u32::MAX) + 1;
        // In an order that would show if the lane did not look at every chunk.
        for chunk in [3, 0, 7, 1, 6, 2, 5, 4] {
            let data = &bytes[12 * chunk..][..12];
            let at = slot + 16 * chunk as u64;
            self.word("rings", at).store(u64::from_le_bytes(data[..8].try_into().unwrap()), Ordering::SeqCst);
            let high = u64::from(u32::from_le_bytes(data[8..].try_into().unwrap())) | tag << 32;
            self.word("rings", at + 8).store(high, Ordering::SeqCst);
        }
        id
    }

    /// Takes what replies there are.
    fn take(&mut self) {
        for lane in 0..self.lanes {
            let own = usize::try_from(lane).unwrap();
            loop {
                let position = self.taken[own];
                let slots = 1 << SLOTS_LOG2;
                let at = self.lane(lane) + (slots + position % slots) * u64::from(actor::SLOT_BYTES);
                let tag = (position >> SLOTS_LOG2) % u64::from(u32::MAX) + 1;
                let mut bytes = Vec::new();
                for chunk in 0..8 {
                    let high = self.word("rings", at + 16 * chunk + 8).load(Ordering::SeqCst);
                    if high >> 32 != tag {
                        break;
                    }
                    bytes.extend(self.word("rings", at + 16 * chunk).load(Ordering::SeqCst).to_le_bytes());
                    bytes.extend(&high.to_le_bytes()[..4]);
                }
                if bytes.len() < 96 {
                    break;
                }
                self.taken[own] += 1;
                let replies_taken = self.lane(lane) - u64::from(actor::LANE_CONTROL_BYTES - actor::LANE_REPLIES_TAKEN);
                self.word("rings", replies_taken).store(self.taken[own], Ordering::SeqCst);
                let wide = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
                let what = u32::from_le_bytes(bytes[28..32].try_into().unwrap());
                // Nothing is sent that nobody has written.
                assert!(!bytes.windows(4).any(|part| part == [0xa5; 4]), "{bytes:x?}");
                self.got.push(Message {
                    id: wide(0),
                    about: wide(8),
                    clock: wide(16),
                    to: u32::from_le_bytes(bytes[24..28].try_into().unwrap()),
                    kind: u16::try_from(what & 0xffff).unwrap(),
                    flags: what & 0xff_0000,
                    payload: bytes[32..32 + usize::try_from(what >> 24).unwrap()].to_vec(),
                });
            }
        }
    }

    /// The answer to a message.
    fn answer(&mut self, id: u64) -> Message {
        let until = Instant::now() + Duration::from_secs(20);
        loop {
            if let Some(at) = self.got.iter().position(|message| message.about == id) {
                return self.got.swap_remove(at);
            }
            self.take();
            let is_over = self.run.as_ref().is_some_and(std::thread::JoinHandle::is_finished);
            if is_over {
                panic!("the lane is gone: {:?}", self.run.take().unwrap().join().unwrap());
            }
            assert!(Instant::now() < until, "no answer");
        }
    }

    fn control(&mut self, index: u32, control: Control) -> Message {
        let id = self.post(3 << 24 | index, control as u16, actor::FLAG_CONTROL, 0, &[0; 8]);
        self.answer(id)
    }

    fn state(&self, index: u64) -> u32 {
        let word = self.word("telemetry", index * u64::from(actor::TELEMETRY_BYTES)).load(Ordering::SeqCst);
        u32::try_from(word & 0xffff_ffff).unwrap()
    }

    fn telemetry(&self, index: u64, offset: u32) -> u64 {
        self.word("telemetry", index * u64::from(actor::TELEMETRY_BYTES) + u64::from(offset)).load(Ordering::SeqCst)
    }
}

fn to(index: u32) -> u32 {
    3 << 24 | index
}

/// A number, and whom to answer: nobody is the sender.
fn number(n: u64, whom: u32) -> Vec<u8> {
    [n.to_le_bytes().as_slice(), &whom.to_le_bytes()].concat()
}

#[test]
fn actors_answer_in_order_and_come_back_after_they_made_way() {
    let mut executor = Executor::new(compiled(COUNTER, 1), 2);
    executor.launch();
    for index in 0..4 {
        let answer = executor.control(index, Control::Activate);
        assert_eq!((answer.flags & actor::FLAG_FAULT, answer.word(0)), (0, ActorState::Active as u32));
        assert_eq!(executor.state(index.into()), ActorState::Active as u32);
    }
    let shake = executor.control(1, Control::Handshake);
    let words: Vec<u32> = (0..actor::HANDSHAKE.len()).map(|n| shake.word(n)).collect();
    assert_eq!(words, actor::HANDSHAKE);
    let mut sums = [0; 4];
    let mut clock = 0;
    for n in 1..=60_u64 {
        if n % 25 == 0 {
            executor.leave();
            executor.launch();
        }
        let index = u32::try_from(n % 4).unwrap();
        sums[index as usize] += n;
        let id = executor.post(to(index), 9, 0, 0, &number(n, 0));
        let answer = executor.answer(id);
        assert_eq!((answer.number(), answer.kind, answer.to), (sums[index as usize], 9, PORT), "{n}");
        assert_eq!(answer.id >> 32, u64::from(to(index)));
        assert_eq!(answer.flags, actor::FLAG_REPLY);
        if index == 0 {
            assert!(answer.clock > clock, "later than before");
            clock = answer.clock;
        }
    }
    assert_eq!(executor.telemetry(2, actor::ACTOR_HANDLED), 15);
    executor.leave();
}

#[test]
fn messages_go_from_actor_to_actor_on_the_device() {
    let mut executor = Executor::new(compiled(COUNTER, 1), 3);
    executor.launch();
    for index in 0..6 {
        executor.control(index, Control::Activate);
    }
    // To an actor of another lane, which answers who passed it on; that one does not answer an answer.
    let sent: Vec<u64> = (1..=20).map(|n| executor.post(to(0), 0, 0, 0, &number(n, to(4)))).collect();
    let until = Instant::now() + Duration::from_secs(20);
    while executor.telemetry(0, actor::ACTOR_HANDLED) < 40 {
        assert!(Instant::now() < until, "{}", executor.telemetry(0, actor::ACTOR_HANDLED));
        executor.take();
    }
    assert_eq!(executor.telemetry(4, actor::ACTOR_HANDLED), 20);
    assert!(executor.got.iter().all(|message| !sent.contains(&message.about)), "they were passed on, not answered");
    // What cannot be delivered is the host's: to one that is no more, to nobody, and to somebody else's.
    assert_eq!(executor.control(4, Control::Terminate).word(0), ActorState::Terminated as u32);
    let nobody = [(to(4), Refused::Terminated), (to(6), Refused::Foreign), (5 << 24, Refused::Foreign)];
    for (address, why) in nobody {
        executor.post(to(0), 3, 0, 0, &number(1, address));
        let until = Instant::now() + Duration::from_secs(20);
        let letter = loop {
            executor.take();
            if let Some(at) = executor.got.iter().position(|message| message.to == 0xff00_0000) {
                break executor.got.swap_remove(at);
            }
            assert!(Instant::now() < until, "no dead letter");
        };
        assert_eq!((letter.refusal(), letter.flags), (Some(why as u32), actor::FLAG_FAULT), "{address:x}");
        assert_eq!((letter.word(3), letter.word(7), letter.word(8) & 0xffff), (address, to(0), 3));
    }
    assert_eq!(executor.control(0, Control::Ping).word(0), ActorState::Active as u32);
    executor.leave();
}

#[test]
fn an_actor_that_misbehaves_is_alone_with_it() {
    let mut executor = Executor::new(compiled(HOSTILE, 1), 1);
    executor.launch();
    executor.control(0, Control::Activate);
    executor.control(1, Control::Activate);
    let trap = |kind: TrapKind| actor::TRAPS_FROM + kind as u32;
    let trapped = [
        (1, trap(TrapKind::Unreachable)),
        (2, actor::TRAP_DEADLINE),
        (3, trap(TrapKind::OutOfBounds)),
        (5, trap(TrapKind::OutOfBounds)),
        (4, actor::TRAP_BAD_OUTBOX),
        (6, actor::TRAP_BAD_OUTBOX),
        (7, 77),
    ];
    for (n, (kind, trap)) in (1..).zip(trapped) {
        let id = executor.post(to(0), kind, 0, 0, &[]);
        let answer = executor.answer(id);
        assert_eq!(answer.refusal(), Some(Refused::Trapped as u32), "{kind}");
        assert_eq!(answer.word(1), trap, "{kind}");
        assert_eq!((answer.word(3), answer.word(6), answer.word(8)), (to(0), id as u32, kind.into()));
        assert_eq!(executor.state(0), ActorState::Faulted as u32);
        // What it is sent from here on comes back; the other one does not notice.
        let id = executor.post(to(0), 0, 0, 0, &[]);
        assert_eq!(executor.answer(id).refusal(), Some(Refused::Faulted as u32));
        assert_eq!(executor.control(1, Control::Ping).word(0), ActorState::Active as u32);
        assert_eq!(executor.control(0, Control::Restart).word(0), ActorState::Active as u32);
        assert_eq!(executor.telemetry(0, actor::ACTOR_FAULTS), n);
    }
    // It may say itself that it knows no such messages.
    let id = executor.post(to(1), 8, 0, 0, &[]);
    assert_eq!(executor.answer(id).refusal(), Some(Refused::Refused as u32));
    // What is not possible now is acknowledged with the state that there is.
    for (index, control) in [(0, Control::Resume), (1, Control::Restart), (0, Control::Activate)] {
        assert_eq!(executor.control(index, control).word(0), ActorState::Active as u32, "{control:?}");
    }
    let id = executor.post(to(0), 99, actor::FLAG_CONTROL, 0, &[]);
    assert_eq!(executor.answer(id).refusal(), Some(Refused::Refused as u32));
    let nobody = [(to(2), Refused::Absent), (to(17), Refused::Foreign), (to(0xff_ffff), Refused::Foreign)];
    for (address, why) in nobody.into_iter().chain([(5 << 24, Refused::Foreign)]) {
        let id = executor.post(address, 0, 0, 0, &[]);
        assert_eq!(executor.answer(id).refusal(), Some(why as u32), "{address:x}");
    }
    let id = executor.post(to(1), 0, 0, 1, &[]);
    assert_eq!(executor.answer(id).refusal(), Some(Refused::Expired as u32), "its time was long ago");
    executor.leave();
}

#[test]
fn a_paused_actor_s_messages_wait_in_order() {
    let mut executor = Executor::new(compiled(COUNTER, 1), 1);
    executor.launch();
    executor.control(0, Control::Activate);
    executor.control(1, Control::Activate);
    assert_eq!(executor.control(0, Control::Pause).word(0), ActorState::Paused as u32);
    let held: Vec<u64> = (1..=4).map(|n| executor.post(to(0), 0, 0, 0, &number(n, 0))).collect();
    let more = executor.post(to(0), 0, 0, 0, &number(100, 0));
    assert_eq!(executor.answer(more).refusal(), Some(Refused::Full as u32), "there is room for four");
    let other = executor.post(to(1), 0, 0, 0, &number(5, 0));
    assert_eq!(executor.answer(other).number(), 5, "another does not wait");
    // They wait even while the lane makes way.
    executor.leave();
    executor.launch();
    executor.control(0, Control::Resume);
    let after = executor.post(to(0), 0, 0, 0, &number(1_000, 0));
    for (n, id) in (1..).zip(held) {
        assert_eq!(executor.answer(id).number(), n * (n + 1) / 2);
    }
    assert_eq!(executor.telemetry(0, actor::ACTOR_HELD_MAX), 4);
    assert_eq!(executor.answer(after).number(), 1_010);
    // Those of one that is terminated come back.
    executor.control(0, Control::Pause);
    let held = executor.post(to(0), 0, 0, 0, &number(1, 0));
    assert_eq!(executor.control(0, Control::Terminate).word(0), ActorState::Terminated as u32);
    assert_eq!(executor.answer(held).refusal(), Some(Refused::Terminated as u32));
    executor.leave();
}

#[test]
fn items_of_a_handler_meet_and_one_that_traps_holds_nobody_up() {
    for items in [32, 64] {
        let mut executor = Executor::new(compiled(TOGETHER, items), 1);
        executor.launch();
        executor.control(0, Control::Activate);
        let payload: Vec<u8> = (1..=u8::try_from(items).unwrap()).collect();
        let sum: u32 = payload.iter().map(|n| u32::from(*n)).sum();
        for _ in 0..3 {
            let id = executor.post(to(0), 1_000, 0, 0, &payload);
            assert_eq!(executor.answer(id).word(0), sum);
        }
        for who in [0, 5, u16::try_from(items - 1).unwrap()] {
            let id = executor.post(to(0), who, 0, 0, &payload);
            let answer = executor.answer(id);
            assert_eq!(answer.refusal(), Some(Refused::Trapped as u32));
            assert_eq!(answer.word(1), actor::TRAPS_FROM + TrapKind::Unreachable as u32);
            executor.control(0, Control::Restart);
            let id = executor.post(to(0), 1_000, 0, 0, &payload);
            assert_eq!(executor.answer(id).word(0), sum);
        }
        executor.leave();
    }
}

#[test]
fn a_lane_waits_until_its_replies_are_taken() {
    let mut executor = Executor::new(compiled(COUNTER, 1), 1);
    executor.launch();
    executor.control(0, Control::Activate);
    let ids: Vec<u64> = (0..40).map(|_| executor.post(to(0), 0, 0, 0, &number(1, 0))).collect();
    // The mailbox is full before the host has looked at a reply; all are answered, each once, in order.
    for (n, id) in (1..).zip(ids) {
        assert_eq!(executor.answer(id).number(), n);
    }
    executor.take();
    assert!(executor.got.is_empty());
    executor.leave();
}

#[test]
fn what_is_no_handler_is_refused() {
    let refused = |text: &str, items: u32| {
        let wasm = wat::parse_str(text).unwrap();
        Program::read(&wasm).unwrap().compile_actor("handle", items).unwrap_err().to_string()
    };
    for items in [0, 2, 33, 992] {
        assert!(refused(COUNTER, items).contains("multiple of 32"), "{items}");
    }
    assert!(refused(r#"(module (memory 1) (func (export "handle") (param i32 i32)))"#, 1).contains("parameters"));
    let lanes = r#"(module (import "kernel" "subgroup_lane" (func $lane (result i32)))
      (import "kernel" "subgroup_any" (func $any (param i32) (result i32))) (memory 1)
      (func (export "handle") (param $state i32) (param i32 i32)
        (i32.store (local.get $state) (call $any (call $lane)))))"#;
    assert!(refused(lanes, 32).contains("exchange registers"));
}

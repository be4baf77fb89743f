//! Lanes of a GPU, run where there is none: the device is the CPU's, and what it is given to run is PTX, which the
//! compiler's emulator does. What they answer is what lanes of a CPU answer, to the byte.

use std::sync::Arc;
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use tensor_wasm_gpu::{DeviceChoice, HostCode, HostKernels, HostLaunch, HostMemory, HostModule};
use tensor_wasm_jit::emulate::{DeviceMemory, Emulator, OtherMemory};

use super::*;
use crate::backend::gpu_image;
use crate::builtin::{key_value, reduce};
use crate::{Executor, ExecutorOptions, Port, Runtime};

const LONG: Duration = Duration::from_secs(60);

struct Emulated;

struct EmulatedLanes(Emulator);

struct Mapped(Arc<HostMemory>);

impl OtherMemory for Mapped {
    fn read(&self, address: u64, bytes: &mut [u8]) -> bool {
        self.0.read(address, bytes)
    }

    fn write(&self, address: u64, bytes: &[u8]) -> bool {
        self.0.write(address, bytes)
    }
}

impl HostCode for Emulated {
    fn load(&self, _stream: usize, image: &[u8]) -> Result<Arc<dyn HostModule>, String> {
        let text = std::str::from_utf8(image).map_err(|error| error.to_string())?;
        Ok(Arc::new(EmulatedLanes(Emulator::new(text)?)))
    }

    fn forget(&self, _stream: usize) {}
}

impl HostModule for EmulatedLanes {
    fn params(&self, _kernel: &str) -> Option<Vec<(u32, u32)>> {
        Some(self.0.params())
    }

    /// A thread for each group: none of them ends before it is told to.
    fn launch(&self, launch: &HostLaunch<'_>) {
        std::thread::scope(|scope| {
            for lane in 0..launch.groups[0] {
                scope.spawn(move || {
                    let mut memory = DeviceMemory::of(Box::new(Mapped(launch.memory.clone())));
                    let ran = self.0.run_group(&mut memory, launch.params, launch.groups, launch.items, [lane, 0, 0]);
                    // Nobody would hear of a panic here.
                    if let Err(why) = ran {
                        eprintln!("a lane failed in the emulator: {why}");
                        std::process::abort();
                    }
                });
            }
        });
    }
}

fn emulated() -> Runtime {
    let host = HostKernels(Some(Arc::new(Emulated)));
    Runtime::builder().device(DeviceChoice::Cpu).host(host).lanes(|_, own| gpu_image(own)).build().unwrap()
}

fn cpu() -> Runtime {
    Runtime::builder().device(DeviceChoice::Cpu).build().unwrap()
}

fn launch(runtime: &Runtime, builtin: Builtin, options: ExecutorOptions) -> Executor {
    runtime.launch("test", Behaviour::Builtin(builtin), &options).unwrap()
}

/// What came of a message: the answer's kind and payload, or why there was none.
type Came = Result<(u16, Vec<u8>), (u32, u32)>;

fn ask(executor: &Executor, port: &Arc<Port>, index: u32, kind: u16, payload: &[u8]) -> Came {
    let actor = executor.actor(index).unwrap();
    let message = Message::of_bytes(actor.address(), kind, payload).unwrap();
    let id = actor.by(port).send_message(message).unwrap();
    let answer = loop {
        let answer = port.receive(LONG).unwrap_or_else(|| panic!("no answer to kind {kind}"));
        if answer.about == id {
            break answer;
        }
    };
    match answer.fault() {
        Some(fault) => Err((fault.reason, fault.trap)),
        None => Ok((answer.kind, answer.payload().unwrap().to_vec())),
    }
}

/// Messages made by chance, of which most make sense.
fn script(builtin: Builtin, rng: &mut StdRng) -> Vec<(u32, u16, Vec<u8>)> {
    let mut one = || -> (u16, Vec<u8>) {
        match builtin {
            Builtin::Echo => {
                let length = rng.random_range(0..=64);
                (rng.random(), (0..length).map(|_| rng.random()).collect())
            }
            Builtin::Counter => match rng.random_range(0..8) {
                0 => (1, (u64::MAX - rng.random_range(0..3_000)).to_le_bytes().to_vec()),
                1..5 => (1, rng.random_range(0..1_000_u64).to_le_bytes().to_vec()),
                5 | 6 => (2, Vec::new()),
                _ => (rng.random_range(0..4), vec![0; rng.random_range(0..10)]),
            },
            Builtin::KeyValue => {
                let kind = rng.random_range(1..5);
                let mut payload = (rng.random_range(0..6_u64) << 33).to_le_bytes().to_vec();
                let length =
                    if kind == key_value::PUT { rng.random_range(0..=50) } else { rng.random_range(0..20) / 19 };
                payload.extend((0..length).map(|_| rng.random::<u8>()));
                (kind, payload)
            }
            Builtin::Reduce => match rng.random_range(0..4) {
                // Those that are not answered are sent by another way; wrong ones come back.
                0 => (reduce::NUMBERS, vec![0; rng.random_range(1..4)]),
                1 => (3, Vec::new()),
                2 => (2, vec![0; rng.random_range(0..2)]),
                _ => (2, Vec::new()),
            },
            Builtin::Relay => match rng.random_range(0..3) {
                0 => (1, 0_u32.to_le_bytes().to_vec()),
                1 => (2, [3_u64.to_le_bytes(), 4_u64.to_le_bytes()].concat()),
                _ => (7, Vec::new()),
            },
            Builtin::Spin => (rng.random_range(1..3), rng.random_range(0..3_u32).to_le_bytes().to_vec()),
        }
    };
    (0..40).map(|n| (n % 3, one())).map(|(index, (kind, payload))| (index, kind, payload)).collect()
}

#[test]
fn lanes_of_a_gpu_answer_as_lanes_of_a_cpu_do() {
    let (gpu, cpu) = (emulated(), cpu());
    let ports = [&gpu, &cpu].map(|runtime| Arc::new(runtime.port().unwrap()));
    let mut rng = StdRng::seed_from_u64(12);
    for builtin in Builtin::ALL {
        let options = ExecutorOptions { lanes: 2, actors: 3, state_bytes: 256, mailbox_slots: 8, ..Default::default() };
        let (there, here) = (launch(&gpu, builtin, options), launch(&cpu, builtin, options));
        for (n, (index, kind, payload)) in script(builtin, &mut rng).into_iter().enumerate() {
            if builtin == Builtin::Reduce && n % 2 == 0 {
                let numbers: Vec<u8> =
                    (0..rng.random_range(1..16)).flat_map(|_| rng.random_range(-1e6_f32..1e6).to_le_bytes()).collect();
                for executor in [&there, &here] {
                    let actor = executor.actor(index).unwrap();
                    actor.send_message(Message::of_bytes(actor.address(), reduce::NUMBERS, &numbers).unwrap()).unwrap();
                }
            }
            let own = ask(&there, &ports[0], index, kind, &payload);
            let expected = ask(&here, &ports[1], index, kind, &payload);
            assert_eq!(own, expected, "{builtin:?}: message {n}, of kind {kind} with {payload:?}");
            if matches!(own, Err((reason, _)) if reason == Reason::Trapped as u32) {
                for executor in [&there, &here] {
                    let actor = executor.actor(index).unwrap();
                    assert_eq!(actor.status(), ActorState::Faulted);
                    actor.restart().unwrap();
                }
            }
        }
        for index in 0..3 {
            // A lane of a GPU answers first and writes down afterwards what it did; what comes later is behind that.
            let told = [&there, &here].map(|executor| {
                executor.actor(index).unwrap().ping().unwrap();
                executor.actor(index).unwrap().telemetry().unwrap()
            });
            let of = |n: usize| (told[n].state, told[n].restarts, told[n].handled, told[n].sent, told[n].faults);
            assert_eq!(of(0), of(1), "{builtin:?}");
        }
    }
}

#[test]
fn an_actor_of_a_gpu_goes_through_its_life_as_any_other() {
    let runtime = emulated();
    let executor = launch(&runtime, Builtin::Counter, ExecutorOptions { actors: 2, ..Default::default() });
    let actor = executor.actor(0).unwrap();
    let add = |n: u64| actor.request(&crate::builtin::counter::Add(n)).unwrap();
    let value = |message: Message| u64::from_le_bytes(message.payload().unwrap().try_into().unwrap());
    assert_eq!(value(add(5).wait(LONG).unwrap()), 5);
    actor.pause().unwrap();
    assert_eq!(actor.status(), ActorState::Paused);
    let waiting = [add(1), add(2)];
    assert_eq!(
        ask(&executor, &Arc::new(runtime.port().unwrap()), 1, 2, &[]),
        Ok((3, vec![0; 8])),
        "another does not wait"
    );
    actor.resume().unwrap();
    let answers = waiting.map(|pending| value(pending.wait(LONG).unwrap()));
    assert_eq!(answers, [6, 8]);
    assert_eq!(actor.telemetry().unwrap().held_max, 2);
    actor.terminate().unwrap();
    assert!(matches!(add(1).wait(LONG), Err(ActorError::Terminated { .. })));
    actor.activate().unwrap();
    assert_eq!(value(add(1).wait(LONG).unwrap()), 1, "with fresh state");
    executor.drain(LONG).unwrap();
}

#[test]
fn every_behaviour_is_compiled_and_needs_no_more_state_than_it_says() {
    for builtin in Builtin::ALL {
        let image = compile(Behaviour::Builtin(builtin)).unwrap();
        assert!(image.state_bytes_min <= builtin.state_bytes_min(), "{builtin:?}: {}", image.state_bytes_min);
        assert_eq!(image.group_items, 32 + actor::POLLER_ITEMS);
    }
}

#[test]
fn a_handshake_of_a_gpu_says_what_one_of_a_cpu_does() {
    let own: [u32; 16] = zerocopy::transmute!(Handshake::OWN);
    assert_eq!(own, actor::HANDSHAKE);
}

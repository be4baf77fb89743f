//! Options of a command line: `--name value` or `--name=value`. All examples have `--steps`, `--seed`, `--out`,
//! `--save`, `--save-dtype`, `--precision`, `--device` and `--help`; some have options of their own, whose values are
//! text.

use std::path::PathBuf;

use tensor_wasm_tensor::DType;

/// An example, as `--help` describes it.
pub(crate) struct Command {
    pub name: &'static str,
    pub about: &'static str,
    /// Steps of training, if `--steps` does not say how many.
    pub steps: u64,
    pub flags: &'static [Flag],
}

/// An option of one example: `--name VALUE`.
pub(crate) struct Flag {
    pub name: &'static str,
    pub value: &'static str,
    pub about: &'static str,
}

#[derive(Debug)]
pub(crate) struct Options {
    pub steps: u64,
    pub seed: u64,
    /// Where files are written.
    pub out: PathBuf,
    /// What products are computed in while training.
    pub precision: DType,
    given: Vec<(&'static str, String)>,
}

#[derive(Debug)]
pub(crate) enum Parsed {
    Options(Options),
    Help,
}

const COMMON: [Flag; 7] = [
    Flag { name: "steps", value: "N", about: "steps of training" },
    Flag { name: "seed", value: "N", about: "seed of everything that is random (1)" },
    Flag { name: "out", value: "DIR", about: "where files are written (target/examples-out)" },
    Flag { name: "save", value: "FILE", about: "where the trained model is written, as safetensors" },
    Flag { name: "save-dtype", value: "NAME", about: "what its numbers are written as, f32, f16 or bf16 (f32)" },
    Flag { name: "precision", value: "TYPE", about: "of products: f32, bf16 or f16 (f32)" },
    Flag { name: "device", value: "NAME", about: "cpu, cuda, cuda:N or auto; a GPU needs --features cuda (cpu)" },
];

impl Options {
    /// The value of an option of this example, if it was given.
    pub(crate) fn get(&self, name: &str) -> Option<&str> {
        self.given.iter().find(|(own, _)| *own == name).map(|(_, value)| value.as_str())
    }
}

impl Command {
    fn all(&self) -> impl Iterator<Item = &Flag> {
        self.flags.iter().chain(&COMMON)
    }

    pub(crate) fn usage(&self) -> String {
        let mut text = format!("{}\n\nUsage: {} [OPTIONS]\n\nOptions:\n", self.about, self.name);
        for Flag { name, value, about } in self.all() {
            let default = if *name == "steps" { format!(" ({})", self.steps) } else { String::new() };
            text += &format!("  {:<22} {about}{default}\n", format!("--{name} {value}"));
        }
        text + "  --help                 this text"
    }

    pub(crate) fn parse(&self, arguments: impl IntoIterator<Item = String>) -> Result<Parsed, String> {
        let mut given: Vec<(&'static str, String)> = Vec::new();
        let mut arguments = arguments.into_iter();
        while let Some(argument) = arguments.next() {
            if argument == "--help" || argument == "-h" {
                return Ok(Parsed::Help);
            }
            let Some(option) = argument.strip_prefix("--") else {
                return Err(format!("{argument:?} is no option; all arguments are options"));
            };
            let (name, value) = option.split_once('=').map_or((option, None), |(name, value)| (name, Some(value)));
            let Some(flag) = self.all().find(|flag| flag.name == name) else {
                let known: Vec<String> = self.all().map(|flag| format!("--{}", flag.name)).collect();
                return Err(format!("there is no option --{name}; there are {} and --help", known.join(", ")));
            };
            let value = value.map(str::to_owned).or_else(|| arguments.next());
            let Some(value) = value else { return Err(format!("--{name} needs a value: --{name} {}", flag.value)) };
            if given.iter().any(|(other, _)| *other == flag.name) {
                return Err(format!("--{name} is given twice"));
            }
            given.push((flag.name, value));
        }
        let out = PathBuf::from("target/examples-out");
        let mut options = Options { steps: self.steps, seed: 1, out, precision: DType::F32, given };
        options.steps = options.number("steps", options.steps)?;
        options.seed = options.number("seed", options.seed)?;
        if options.steps == 0 {
            return Err("--steps is at least 1".to_owned());
        }
        if let Some(name) = options.get("precision") {
            let known = [DType::F32, DType::BF16, DType::F16].into_iter().find(|dtype| dtype.name() == name);
            options.precision = known.ok_or_else(|| format!("--precision takes f32, bf16 or f16, not {name:?}"))?;
        }
        if let Some(out) = options.get("out") {
            options.out = PathBuf::from(out);
        }
        Ok(Parsed::Options(options))
    }
}

impl Options {
    fn number(&self, name: &str, default: u64) -> Result<u64, String> {
        let parse = |text: &str| text.parse().map_err(|_| format!("--{name} takes a whole number, not {text:?}"));
        self.get(name).map_or(Ok(default), parse)
    }
}

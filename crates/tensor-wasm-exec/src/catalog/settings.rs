//! What a function's author chooses, and how a deploy changes it.
//!
//! Settings belong to a revision: its id is a hash over the bytes and these. A deploy says only what changes (a
//! [`SettingsPatch`]); everything else stays as the serving revision has it.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::record::check_name;
use crate::failure::Rejection;

/// Names and values of the environment together: as much as fits a command line, and far more than a function needs.
const ENV_BYTES_MAX: usize = 32 << 10;

/// Models that a function names. Records hold their names, and each may be open at once.
const MODELS_MAX: usize = 32;

/// Where a function's linear memory comes from.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MemoryKind {
    /// From the engine's pool, a copy-on-write image of the module's: quickest to start.
    #[default]
    Pooled,
    /// From memory that the device sees in place, so that kernels may be passed pointers into it.
    Pinned,
}

impl MemoryKind {
    fn is_pooled(&self) -> bool {
        *self == MemoryKind::Pooled
    }
}

/// Serialised without what has its default, so that a setting added later changes no revision's id.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Settings {
    /// The author promises that a call leaves nothing behind that the next one may not see: instances are kept and
    /// called again.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub reuse: bool,
    /// Callers without a token are answered.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub public: bool,
    /// A tighter deadline than the tenant's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub deadline_ms: Option<u64>,
    /// A tighter memory limit than the tenant's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
    /// It may use the GPU.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub gpu: bool,
    /// Where its linear memory comes from.
    #[serde(skip_serializing_if = "MemoryKind::is_pooled")]
    pub memory: MemoryKind,
    /// Models that it may open, by name.
    #[serde(skip_serializing_if = "BTreeSet::is_empty")]
    pub models: BTreeSet<String>,
    /// Environment variables of the guest.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
}

/// What a deploy says about settings. `None` is "not mentioned", which is not the same as "back to the default".
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SettingsPatch {
    pub reuse: Option<bool>,
    pub public: Option<bool>,
    pub gpu: Option<bool>,
    pub memory: Option<MemoryKind>,
    /// All that it may open from now on.
    pub models: Option<BTreeSet<String>>,
    /// `Some(None)`: the tenant's.
    pub deadline_ms: Option<Option<u64>>,
    /// `Some(None)`: the tenant's.
    pub memory_bytes: Option<Option<u64>>,
    /// Begin with an empty environment instead of the serving revision's.
    pub clears_env: bool,
    /// Variables to set, or with `None` to unset.
    pub env: BTreeMap<String, Option<String>>,
}

impl SettingsPatch {
    /// The settings of a new revision, made from those of the serving one.
    pub fn over(&self, serving: &Settings) -> Settings {
        let mut env = if self.clears_env { BTreeMap::new() } else { serving.env.clone() };
        for (name, value) in &self.env {
            match value {
                Some(value) => drop(env.insert(name.clone(), value.clone())),
                None => drop(env.remove(name)),
            }
        }
        Settings {
            reuse: self.reuse.unwrap_or(serving.reuse),
            public: self.public.unwrap_or(serving.public),
            gpu: self.gpu.unwrap_or(serving.gpu),
            memory: self.memory.unwrap_or(serving.memory),
            deadline_ms: self.deadline_ms.unwrap_or(serving.deadline_ms),
            memory_bytes: self.memory_bytes.unwrap_or(serving.memory_bytes),
            models: self.models.as_ref().unwrap_or(&serving.models).clone(),
            env,
        }
    }
}

impl Settings {
    /// Refuses what could not work, naming it.
    pub(crate) fn check(&self) -> Result<(), Rejection> {
        let invalid = |why: &str| Err(Rejection::InvalidArgs { why: format!("settings: {why}") });
        if self.deadline_ms == Some(0) {
            return invalid("deadline_ms must be at least 1");
        }
        if self.memory_bytes == Some(0) {
            return invalid("memory_bytes must be at least 1");
        }
        if self.models.len() > MODELS_MAX {
            return invalid("models has more than 32 names");
        }
        if let Some(wrong) = self.models.iter().find_map(|name| check_name(name).err()) {
            return invalid(&format!("models: {wrong}"));
        }
        if self.env.iter().map(|(k, v)| k.len() + v.len()).sum::<usize>() > ENV_BYTES_MAX {
            return invalid("env has more than 32 KiB");
        }
        if self.env.iter().any(|(k, v)| k.is_empty() || k.contains(['=', '\0']) || v.contains('\0')) {
            return invalid("env names are not empty and hold no '=' or NUL; values hold no NUL");
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_mentioned_stays() {
        let env = |pairs: &[(&str, &str)]| pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
        let serving = Settings {
            public: true,
            deadline_ms: Some(5),
            memory: MemoryKind::Pinned,
            models: ["m".to_owned()].into(),
            env: env(&[("A", "1"), ("B", "2")]),
            ..Settings::default()
        };
        assert_eq!(SettingsPatch::default().over(&serving), serving);
        let patch = SettingsPatch {
            public: Some(false),
            deadline_ms: Some(None),
            models: Some(["n".to_owned()].into()),
            env: [("A".to_owned(), None), ("C".to_owned(), Some("3".to_owned()))].into(),
            ..SettingsPatch::default()
        };
        let expected = Settings { memory: MemoryKind::Pinned, models: ["n".to_owned()].into(), ..Settings::default() };
        let expected = Settings { env: env(&[("B", "2"), ("C", "3")]), ..expected };
        assert_eq!(patch.over(&serving), expected);
        let cleared = SettingsPatch { clears_env: true, ..SettingsPatch::default() }.over(&serving);
        assert!(cleared.env.is_empty() && cleared.public);
        // What has its default is not written, so that a setting added later changes no revision's id.
        assert_eq!(serde_json::to_string(&Settings::default()).unwrap(), "{}");
    }
}

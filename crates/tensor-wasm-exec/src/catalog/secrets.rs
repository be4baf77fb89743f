//! Secrets: values that a function sees as environment variables and that nobody can read back.
//!
//! A secret belongs to its function, not to a revision: it survives redeploys, and `rollback` neither brings a deleted
//! one back nor an old value. In the store its value is sealed with XChaCha20-Poly1305 under a key that the operator
//! gives and that is nowhere in the data directory; tenant, function and name are authenticated with it, so that a
//! sealed value moved to another row does not open. Records and manifests hold names only.
//!
//! In memory a value is open, behind a type that does not print it and wipes it when its function no longer has it and
//! the last call that may see it is over. An instance that is kept for reuse holds the values of its last call; it goes
//! when the function changes. Copies in network buffers, in a guest's environment as WASI holds it and in the guest's
//! own memory are not wiped.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use base64::Engine;
use base64::engine::general_purpose::{STANDARD as BASE64, STANDARD_NO_PAD};
use chacha20poly1305::aead::{Aead, Payload};
use chacha20poly1305::{KeyInit, XChaCha20Poly1305, XNonce};
use rand::RngCore;
use zeroize::{Zeroize, Zeroizing};

use super::FunctionRecord;
use super::record::NAME_BYTES_MAX;
use super::store::{Change, Read, Store, StoreError, Table};
use crate::failure::Rejection;

const KEY_BYTES: usize = 32;
const NONCE_BYTES: usize = 24;

/// The row that tells whether a key is the one the others were sealed with. No tenant's name is empty.
const KEY_CHECK: &str = "\0key-check";
const KEY_CHECK_TEXT: &[u8] = b"tensor-wasm";

const NO_KEY: &str = "this server keeps no secrets, because it was given no key to seal them with: its operator sets \
                      TENSOR_WASM_SECRETS_KEY (32 bytes, as `openssl rand -hex 32` prints them) or [server] \
                      secrets_key_file";

/// The key that secrets are sealed with. Never printed.
pub struct SecretsKey(Zeroizing<[u8; KEY_BYTES]>);

impl SecretsKey {
    /// Reads 32 bytes as 64 hexadecimal digits or as base64. The complaint does not repeat what was given.
    pub fn parse(text: &str) -> Result<SecretsKey, String> {
        let text = text.trim();
        let bytes = Zeroizing::new(match text.len() {
            64 => blake3::Hash::from_hex(text).map(|bytes| bytes.as_bytes().to_vec()).unwrap_or_default(),
            44 => BASE64.decode(text).unwrap_or_default(),
            43 => STANDARD_NO_PAD.decode(text).unwrap_or_default(),
            _ => Vec::new(),
        });
        let key: Result<[u8; KEY_BYTES], _> = bytes.as_slice().try_into();
        key.map(|key| SecretsKey(Zeroizing::new(key))).map_err(|_| {
            "the key for secrets must be 32 bytes, as 64 hexadecimal digits or as base64 (`openssl rand -hex 32` makes one)"
                .to_owned()
        })
    }
}

impl fmt::Debug for SecretsKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SecretsKey(…)")
    }
}

/// A secret's value.
pub struct Secret(Zeroizing<String>);

impl Secret {
    /// Environment variables are text without NUL.
    pub fn new(bytes: &[u8]) -> Result<Secret, Rejection> {
        let invalid = |why: &str| Rejection::InvalidArgs { why: format!("the secret's value {why}") };
        let text = std::str::from_utf8(bytes).map_err(|_| invalid("is not UTF-8"))?;
        if text.contains('\0') {
            return Err(invalid("holds a NUL"));
        }
        Ok(Secret(Zeroizing::new(text.to_owned())))
    }

    /// For the guest, and nobody else.
    pub(crate) fn expose(&self) -> &str {
        &self.0
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(…)")
    }
}

/// The open secrets of one function by name.
pub(crate) type OpenSecrets = Arc<BTreeMap<String, Arc<Secret>>>;

/// Seals and opens. Without a key it does neither.
pub(crate) struct Vault {
    cipher: Option<XChaCha20Poly1305>,
}

impl Vault {
    /// Fails where there are secrets and the key is missing or another one: they would be lost one call at a time.
    pub(crate) fn open(key: Option<SecretsKey>, store: &Store) -> Result<Vault, StoreError> {
        let vault = Vault { cipher: key.map(|key| XChaCha20Poly1305::new((&*key.0).into())) };
        let fail = |why: &str| Err(StoreError::Secrets { path: store.path().to_owned(), why: why.to_owned() });
        let Some(check) = store.get::<String>(Table::Secrets, KEY_CHECK)? else { return Ok(vault) };
        if vault.cipher.is_none() {
            return fail("it holds secrets, and no key was given");
        }
        match check {
            Read::Good(sealed) if vault.unseal(&sealed, b"").is_some_and(|text| *text == *KEY_CHECK_TEXT) => Ok(vault),
            Read::Good(_) => fail("the key given is not the one its secrets were sealed with"),
            Read::Damaged(_, why) => {
                // It says nothing about the secrets; each is authenticated by itself.
                tracing::error!(why, "the record that checks the key for secrets is damaged");
                Ok(vault)
            }
        }
    }

    /// The change that stores a value, and the row that recognises the key.
    pub(crate) fn put(&self, function: &FunctionRecord, key: &str, value: &Secret) -> Result<Vec<Change>, Rejection> {
        let refused = || Rejection::Conflict { why: NO_KEY.to_owned() };
        let cipher = self.cipher.as_ref().ok_or_else(refused)?;
        let sealed = seal(cipher, value.expose().as_bytes(), &associated(function, key))?;
        let check = seal(cipher, KEY_CHECK_TEXT, b"")?;
        Ok(vec![
            Change::put(Table::Secrets, row(function, key), &sealed),
            Change::put(Table::Secrets, KEY_CHECK, &check),
        ])
    }

    /// Opens a function's secrets. Returns with them what is wrong with those that do not open.
    pub(crate) fn open_all(
        &self,
        store: &Store,
        function: &FunctionRecord,
    ) -> Result<(OpenSecrets, Vec<(String, String)>), StoreError> {
        let (mut opened, mut lost) = (BTreeMap::new(), Vec::new());
        for key in &function.secret_names {
            let value = match store.get::<String>(Table::Secrets, &row(function, key))? {
                Some(Read::Good(sealed)) => self
                    .unseal(&sealed, &associated(function, key))
                    .and_then(|bytes| Secret::new(&bytes).ok())
                    .ok_or_else(|| "its sealed value does not open".to_owned()),
                Some(Read::Damaged(_, why)) => Err(why),
                None => Err("its sealed value is missing".to_owned()),
            };
            match value {
                Ok(value) => drop(opened.insert(key.clone(), Arc::new(value))),
                Err(why) => lost.push((key.clone(), why)),
            }
        }
        Ok((Arc::new(opened), lost))
    }

    fn unseal(&self, sealed: &str, associated: &[u8]) -> Option<Zeroizing<Vec<u8>>> {
        let bytes = BASE64.decode(sealed).ok()?;
        let (nonce, sealed) = bytes.split_first_chunk::<NONCE_BYTES>()?;
        let payload = Payload { msg: sealed, aad: associated };
        self.cipher.as_ref()?.decrypt(&XNonce::from(*nonce), payload).ok().map(Zeroizing::new)
    }
}

fn seal(cipher: &XChaCha20Poly1305, value: &[u8], associated: &[u8]) -> Result<String, Rejection> {
    // At random: of 2^80 values one pair would share a nonce.
    let mut nonce = [0; NONCE_BYTES];
    rand::rng().fill_bytes(&mut nonce);
    let payload = Payload { msg: value, aad: associated };
    let sealed = cipher
        .encrypt(&XNonce::from(nonce), payload)
        .map_err(|_| Rejection::Storage { why: "the secret could not be sealed".to_owned() })?;
    let mut bytes = nonce.to_vec();
    bytes.extend(sealed);
    Ok(BASE64.encode(bytes))
}

/// What a sealed value belongs to, each part with its length, so that no two places read the same.
fn associated(function: &FunctionRecord, key: &str) -> Vec<u8> {
    let mut bytes = b"tensor-wasm secret".to_vec();
    for part in [function.tenant.as_str(), function.id.as_str(), key] {
        bytes.extend((part.len() as u64).to_le_bytes());
        bytes.extend(part.as_bytes());
    }
    bytes
}

fn row(function: &FunctionRecord, key: &str) -> String {
    format!("{}\0{}\0{key}", function.tenant, function.id)
}

/// The change that removes a value.
pub(crate) fn remove(function: &FunctionRecord, key: &str) -> Change {
    Change::Delete(Table::Secrets, row(function, key))
}

/// What `serve --forget-secrets` removes: every sealed value, and what recognised their key.
pub(crate) fn forget_all(store: &Store) -> Result<(), StoreError> {
    let mut changes = Vec::new();
    store.each::<serde::de::IgnoredAny>(Table::Secrets, |key, _| changes.push(Change::Delete(Table::Secrets, key)))?;
    store.write_blocking(changes)
}

/// Names are those of environment variables: letters, digits and `_`, not beginning with a digit.
pub fn check_secret_name(name: &str) -> Result<(), Rejection> {
    let invalid = |why: &str| {
        let name = name.chars().take(64).collect();
        Err(Rejection::InvalidName { name, why: why.to_owned() })
    };
    if name.is_empty() || name.len() > NAME_BYTES_MAX {
        return invalid("a secret's name has 1 to 128 characters");
    }
    if name.starts_with(|c: char| c.is_ascii_digit()) {
        return invalid("a secret's name does not begin with a digit");
    }
    if !name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_') {
        return invalid("a secret's name is an environment variable's: letters, digits and '_'");
    }
    Ok(())
}

/// Wipes a buffer that held a value, where it is the only owner of it.
pub fn wipe(bytes: bytes::Bytes) {
    if let Ok(mut bytes) = bytes.try_into_mut() {
        bytes.as_mut().zeroize();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: &str = "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f";

    fn function(id: &str, names: &[&str]) -> FunctionRecord {
        let mut record: FunctionRecord = serde_json::from_value(serde_json::json!({
            "id": id, "tenant": "t", "name": "n", "created_ms": 1, "revisions": [], "traffic": [],
        }))
        .unwrap();
        record.secret_names = names.iter().map(|name| (*name).to_owned()).collect();
        record
    }

    fn store() -> (tempfile::TempDir, Store) {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(&dir.path().join("s.redb")).unwrap();
        (dir, store)
    }

    #[test]
    fn keys_are_hex_or_base64_and_are_not_printed() {
        let key = SecretsKey::parse(&format!(" {KEY}\n")).unwrap();
        let base64 = SecretsKey::parse(&BASE64.encode(*key.0)).unwrap();
        assert_eq!((*key.0, format!("{key:?}").as_str()), (*base64.0, "SecretsKey(…)"));
        for bad in ["", "hunter2hunter2", &KEY[..62], &format!("{}zz", &KEY[..62]), &"A".repeat(44)] {
            let complaint = SecretsKey::parse(bad).unwrap_err();
            assert!(complaint.contains("32 bytes") && (bad.is_empty() || !complaint.contains(bad)), "{complaint}");
        }
        let secret = Secret::new(b"hunter2").unwrap();
        assert_eq!(format!("{secret:?} {:?}", Some(&secret)), "Secret(…) Some(Secret(…))");
    }

    #[test]
    fn a_value_opens_in_its_own_place_only() {
        let (_dir, store) = store();
        let vault = Vault::open(SecretsKey::parse(KEY).ok(), &store).unwrap();
        let f = function("f", &["A"]);
        let value = Secret::new(b"hunter2").unwrap();
        store.write_blocking(vault.put(&f, "A", &value).unwrap()).unwrap();
        let (open, lost) = vault.open_all(&store, &f).unwrap();
        assert_eq!((open["A"].expose(), lost.len()), ("hunter2", 0));
        // Somebody who can write the store moves it to another function, or another name.
        let Some(Read::Good(sealed)) = store.get::<String>(Table::Secrets, &row(&f, "A")).unwrap() else { panic!() };
        assert!(!sealed.contains("hunter2"));
        let g = function("g", &["A", "B"]);
        let moved = [row(&g, "A"), row(&g, "B")].map(|row| Change::put(Table::Secrets, row, &sealed));
        store.write_blocking(moved.into()).unwrap();
        let (open, lost) = vault.open_all(&store, &g).unwrap();
        assert_eq!((open.len(), lost.len()), (0, 2), "{lost:?}");
    }

    #[test]
    fn a_missing_or_wrong_key_is_said_when_the_store_is_opened() {
        let (_dir, store) = store();
        // Without secrets any key will do, and so will none.
        let none = Vault::open(None, &store).unwrap();
        let f = function("f", &["A"]);
        let value = Secret::new(b"hunter2").unwrap();
        let refused = none.put(&f, "A", &value).unwrap_err().to_string();
        assert!(refused.contains("TENSOR_WASM_SECRETS_KEY") && !refused.contains("hunter2"), "{refused}");
        let vault = Vault::open(SecretsKey::parse(KEY).ok(), &store).unwrap();
        store.write_blocking(vault.put(&f, "A", &value).unwrap()).unwrap();
        let missing = Vault::open(None, &store).err().unwrap().to_string();
        assert!(missing.contains("no key was given"), "{missing}");
        let wrong = Vault::open(SecretsKey::parse(&KEY.replace('0', "f")).ok(), &store).err().unwrap().to_string();
        assert!(wrong.contains("not the one"), "{wrong}");
        assert!(Vault::open(SecretsKey::parse(KEY).ok(), &store).is_ok());
        forget_all(&store).unwrap();
        assert!(Vault::open(None, &store).is_ok());
    }

    #[test]
    fn names_are_those_of_variables() {
        for good in ["A", "_x", "API_KEY_2"] {
            assert!(check_secret_name(good).is_ok(), "{good}");
        }
        for bad in ["", "1A", "A-B", "A=B", "A\0", "ü", "a/b", &"x".repeat(129)] {
            assert!(check_secret_name(bad).is_err(), "{bad}");
        }
    }
}

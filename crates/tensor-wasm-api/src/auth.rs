//! Who is calling: tokens, their scopes, and which tenant a request speaks for.
//!
//! `TENSOR_WASM_API_TOKENS` holds tokens separated by semicolons or white space, each `TOKEN`, `TOKEN:tenant=*` or
//! `TOKEN:tenant=a,b`. A token without a scope speaks for the tenant `default`. With no tokens configured everyone may
//! speak for any tenant, which is why the server then serves loopback only.

use http::{HeaderMap, StatusCode, header};
use subtle::ConstantTimeEq;
use tensor_wasm_exec::catalog::check_name;

use crate::error::ApiError;

pub const TENANT_HEADER: &str = "x-tensorwasm-tenant";
pub const DEFAULT_TENANT: &str = "default";

/// Shorter ones could be guessed; refusing them at start is kinder than an incident.
const TOKEN_BYTES_MIN: usize = 8;

#[derive(Debug, Clone, PartialEq, Eq)]
enum Scope {
    Every,
    Only(Vec<String>),
}

struct Token {
    /// Tokens are compared by hash: in constant time, and none lies in memory in the clear.
    hash: blake3::Hash,
    scope: Scope,
}

#[derive(Default)]
pub struct Tokens {
    tokens: Vec<Token>,
}

impl Tokens {
    pub fn parse(text: &str) -> Result<Tokens, String> {
        let mut tokens = Vec::new();
        for (n, entry) in text.split([';', ' ', '\t', '\n', '\r']).filter(|e| !e.is_empty()).enumerate() {
            // Named by position: the error must not print the secret.
            let wrong = |why: String| format!("TENSOR_WASM_API_TOKENS: token {}: {why}", n + 1);
            let (secret, scope) = match entry.split_once(":tenant=") {
                None => (entry, Scope::Only(vec![DEFAULT_TENANT.to_owned()])),
                Some((secret, "*")) => (secret, Scope::Every),
                Some((secret, list)) => {
                    let tenants: Vec<String> = list.split(',').map(str::to_owned).collect();
                    for tenant in &tenants {
                        check_name(tenant).map_err(|e| wrong(e.to_string()))?;
                    }
                    (secret, Scope::Only(tenants))
                }
            };
            if secret.len() < TOKEN_BYTES_MIN {
                return Err(wrong(format!("it is shorter than {TOKEN_BYTES_MIN} characters")));
            }
            tokens.push(Token { hash: blake3::hash(secret.as_bytes()), scope });
        }
        Ok(Tokens { tokens })
    }

    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// The tenant a request speaks for.
    pub(crate) fn tenant(&self, headers: &HeaderMap) -> Result<String, ApiError> {
        let scope = self.scope(headers)?;
        let asked = match headers.get(TENANT_HEADER).map(|v| v.to_str()) {
            None => None,
            Some(Ok(tenant)) => {
                check_name(tenant)?;
                Some(tenant)
            }
            Some(Err(_)) => return Err(ApiError::bad_request("invalid_name", format!("{TENANT_HEADER} is not text"))),
        };
        match (scope, asked) {
            (Scope::Every, asked) => Ok(asked.unwrap_or(DEFAULT_TENANT).to_owned()),
            (Scope::Only(tenants), Some(asked)) if tenants.iter().any(|t| t == asked) => Ok(asked.to_owned()),
            (Scope::Only(_), Some(asked)) => Err(denied(format!("this token does not speak for tenant {asked:?}"))),
            (Scope::Only(tenants), None) => match tenants.as_slice() {
                [only] => Ok(only.clone()),
                many if many.iter().any(|t| t == DEFAULT_TENANT) => Ok(DEFAULT_TENANT.to_owned()),
                many => Err(denied(format!("this token speaks for {}; name one in {TENANT_HEADER}", many.join(", ")))),
            },
        }
    }

    /// Lets only those through who may speak for every tenant.
    pub(crate) fn operator(&self, headers: &HeaderMap) -> Result<(), ApiError> {
        match self.scope(headers)? {
            Scope::Every => Ok(()),
            Scope::Only(_) => {
                let message = "this needs a token for every tenant (TOKEN:tenant=*)";
                Err(ApiError::new(StatusCode::FORBIDDEN, "permission_denied", message))
            }
        }
    }

    /// Whether the request carries one of our tokens; such a header is not for the guest.
    pub(crate) fn carries_token(&self, headers: &HeaderMap) -> bool {
        !self.is_empty() && self.scope(headers).is_ok()
    }

    fn scope(&self, headers: &HeaderMap) -> Result<Scope, ApiError> {
        if self.is_empty() {
            return Ok(Scope::Every);
        }
        let unauthorized = |message: &str| ApiError::new(StatusCode::UNAUTHORIZED, "unauthorized", message);
        let Some(value) = headers.get(header::AUTHORIZATION) else {
            return Err(unauthorized("a token is needed: Authorization: Bearer TOKEN"));
        };
        let presented = value.to_str().ok().and_then(|v| v.split_once(' '));
        let Some((_, token)) = presented.filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer")) else {
            return Err(unauthorized("the Authorization header is not of the form: Bearer TOKEN"));
        };
        let hash = blake3::hash(token.trim().as_bytes());
        // Every token is looked at, so that the time taken does not tell which one came close.
        let mut found = None;
        for known in &self.tokens {
            if bool::from(known.hash.as_bytes().ct_eq(hash.as_bytes())) {
                found = Some(&known.scope);
            }
        }
        found.cloned().ok_or_else(|| unauthorized("the token is not known here"))
    }
}

fn denied(message: String) -> ApiError {
    ApiError::new(StatusCode::FORBIDDEN, "tenant_scope_denied", message)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(token: Option<&str>, tenant: Option<&str>) -> HeaderMap {
        let mut headers = HeaderMap::new();
        if let Some(token) = token {
            headers.insert(header::AUTHORIZATION, format!("Bearer {token}").parse().unwrap());
        }
        if let Some(tenant) = tenant {
            headers.insert(TENANT_HEADER, tenant.parse().unwrap());
        }
        headers
    }

    #[test]
    fn scopes() {
        let tokens = Tokens::parse("plain-token; admin-token:tenant=*\nteam-token:tenant=a,b").unwrap();
        let check = |token, tenant, expect: Result<&str, &str>| {
            let found = tokens.tenant(&headers(token, tenant)).map_err(|e| e.kind);
            assert_eq!(found.as_deref(), expect.as_deref(), "{token:?} {tenant:?}");
        };
        check(None, None, Err("unauthorized"));
        check(Some("wrong-token"), None, Err("unauthorized"));
        check(Some("plain-token"), None, Ok("default"));
        check(Some("plain-token"), Some("a"), Err("tenant_scope_denied"));
        check(Some("admin-token"), None, Ok("default"));
        check(Some("admin-token"), Some("anyone"), Ok("anyone"));
        check(Some("admin-token"), Some("../x"), Err("invalid_name"));
        check(Some("team-token"), Some("b"), Ok("b"));
        check(Some("team-token"), None, Err("tenant_scope_denied"));
    }

    #[test]
    fn mistakes_do_not_print_the_secret() {
        let error = Tokens::parse("good-token-1 s3cret").err().unwrap();
        assert!(error.contains("token 2") && !error.contains("s3cret"), "{error}");
        assert!(Tokens::parse("long-enough:tenant=a/b").is_err());
        assert!(Tokens::parse("").unwrap().is_empty());
    }
}

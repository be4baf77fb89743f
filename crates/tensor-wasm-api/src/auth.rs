//! Who is calling: tokens, their scopes, and which tenant a request speaks for.
//!
//! `TENSOR_WASM_API_TOKENS` holds tokens separated by semicolons or white space, each `TOKEN`, `TOKEN:tenant=*` or
//! `TOKEN:tenant=a,b`, and `:name=ci` after any of them. A token without a scope speaks for the tenant `default`; one
//! without a name is called by the beginning of its hash. With no tokens configured everyone may speak for any tenant,
//! which is why the server then serves loopback only.

use http::{HeaderMap, StatusCode, header};
use subtle::ConstantTimeEq;
use tensor_wasm_exec::catalog::check_name;

use crate::error::ApiError;

pub const TENANT_HEADER: &str = "x-tensorwasm-tenant";
pub const DEFAULT_TENANT: &str = "default";

/// Shorter ones could be guessed; refusing them at start is kinder than an incident.
const TOKEN_BYTES_MIN: usize = 8;

/// Of a token's hash, in the name of one that was given none: enough to tell tokens apart, too little to test a guess.
const NAME_HEX_DIGITS: usize = 6;

#[derive(Debug, Clone, PartialEq, Eq)]
enum Scope {
    Every,
    Only(Vec<String>),
}

struct Token {
    /// Tokens are compared by hash: in constant time, and none lies in memory in the clear.
    hash: blake3::Hash,
    scope: Scope,
    /// What the audit log calls it.
    name: String,
}

/// What a request without tokens to choose from may do.
static EVERYONE: Scope = Scope::Every;

#[derive(Default)]
pub struct Tokens {
    tokens: Vec<Token>,
}

impl Tokens {
    pub fn parse(text: &str) -> Result<Tokens, String> {
        let mut tokens: Vec<Token> = Vec::new();
        for (n, entry) in text.split([';', ' ', '\t', '\n', '\r']).filter(|e| !e.is_empty()).enumerate() {
            // Named by position: the error must not print the secret, nor what may be a part of it.
            let wrong = |why: String| format!("TENSOR_WASM_API_TOKENS: token {}: {why}", n + 1);
            let mut parts = entry.split(':');
            let secret = parts.next().unwrap_or_default();
            if secret.len() < TOKEN_BYTES_MIN {
                return Err(wrong(format!("it is shorter than {TOKEN_BYTES_MIN} characters")));
            }
            let (mut scope, mut name) = (None, None);
            for part in parts {
                match part.split_once('=') {
                    Some(("tenant", "*")) if scope.is_none() => scope = Some(Scope::Every),
                    Some(("tenant", list)) if scope.is_none() => {
                        let tenants: Vec<String> = list.split(',').map(str::to_owned).collect();
                        for tenant in &tenants {
                            check_name(tenant).map_err(|e| wrong(format!("tenant={e}")))?;
                        }
                        scope = Some(Scope::Only(tenants));
                    }
                    Some(("name", given)) if name.is_none() => {
                        check_name(given).map_err(|e| wrong(format!("name={e}")))?;
                        name = Some(given.to_owned());
                    }
                    // A misspelt scope must not become a part of the secret.
                    _ => {
                        return Err(wrong(
                            "after the token come :tenant=… and :name=…, each once, and nothing else".into(),
                        ));
                    }
                }
            }
            let hash = blake3::hash(secret.as_bytes());
            let name = name.unwrap_or_else(|| format!("id-{}", &hash.to_hex()[..NAME_HEX_DIGITS]));
            if let Some(same) = tokens.iter().position(|t| t.hash == hash || t.name == name) {
                return Err(wrong(format!("it has the secret or the name of token {}", same + 1)));
            }
            let scope = scope.unwrap_or_else(|| Scope::Only(vec![DEFAULT_TENANT.to_owned()]));
            tokens.push(Token { hash, scope, name });
        }
        Ok(Tokens { tokens })
    }

    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// The tenant a request speaks for, by its token and by what it asks for in the header.
    pub(crate) fn tenant(&self, headers: &HeaderMap) -> Result<String, ApiError> {
        let asked = match headers.get(TENANT_HEADER).map(|v| v.to_str()) {
            None => None,
            Some(Ok(tenant)) => {
                self.scope(headers)?;
                check_name(tenant)?;
                Some(tenant)
            }
            Some(Err(_)) => return Err(ApiError::bad_request("invalid_name", format!("{TENANT_HEADER} is not text"))),
        };
        self.speaks_for(headers, asked)
    }

    /// The same, where the tenant is not asked for in the header.
    pub(crate) fn speaks_for(&self, headers: &HeaderMap, asked: Option<&str>) -> Result<String, ApiError> {
        match (self.scope(headers)?, asked) {
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

    /// What the audit log calls the token of a request; `None` without one, or without one of ours.
    pub(crate) fn name(&self, headers: &HeaderMap) -> Option<&str> {
        self.presented(headers).ok().flatten().map(|token| token.name.as_str())
    }

    /// Whether the request carries one of our tokens; such a header is not for the guest.
    pub(crate) fn carries_token(&self, headers: &HeaderMap) -> bool {
        self.presented(headers).is_ok_and(|token| token.is_some())
    }

    fn scope(&self, headers: &HeaderMap) -> Result<&Scope, ApiError> {
        Ok(self.presented(headers)?.map_or(&EVERYONE, |token| &token.scope))
    }

    /// The token of a request; `None` where none is needed.
    fn presented(&self, headers: &HeaderMap) -> Result<Option<&Token>, ApiError> {
        if self.is_empty() {
            return Ok(None);
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
                found = Some(known);
            }
        }
        found.map(Some).ok_or_else(|| unauthorized("the token is not known here"))
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
    fn tokens_have_names() {
        let tokens = Tokens::parse("first-token:tenant=*:name=ci second-token").unwrap();
        assert_eq!(tokens.name(&headers(Some("first-token"), None)), Some("ci"));
        let second = tokens.name(&headers(Some("second-token"), None)).unwrap();
        assert!(second.starts_with("id-") && second.len() == 9, "{second}");
        assert_eq!(tokens.name(&headers(Some("third-token"), None)), None);
    }

    #[test]
    fn mistakes_do_not_print_the_secret() {
        let error = Tokens::parse("good-token-1 s3cret").err().unwrap();
        assert!(error.contains("token 2") && !error.contains("s3cret"), "{error}");
        assert!(Tokens::parse("long-enough:tenant=a/b").is_err());
        for misspelt in
            ["long-enough:tennant=a", "long-enough:tenant", "long-enough:*", "long-enough:tenant=a:tenant=b"]
        {
            let error = Tokens::parse(misspelt).err().unwrap();
            assert!(error.contains("nothing else") && !error.contains("long-enough"), "{error}");
        }
        assert!(Tokens::parse("long-enough:name=x other-token:name=x").err().unwrap().contains("token 1"));
        assert!(Tokens::parse("").unwrap().is_empty());
    }
}

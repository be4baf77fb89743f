//! An expression's text, word by word.

use crate::dtype::Scalar;

#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Token<'t> {
    pub kind: TokenKind<'t>,
    /// Byte of the text.
    pub at: usize,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum TokenKind<'t> {
    Name(&'t str),
    Number(Scalar),
    /// Between quotes.
    Text(&'t str),
    Symbol(Symbol),
    End,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Symbol {
    Power,
    Plus,
    Minus,
    Star,
    Slash,
    Percent,
    At,
    Equal,
    NotEqual,
    LessEqual,
    GreaterEqual,
    Less,
    Greater,
    And,
    Or,
    Not,
    Assign,
    Open,
    Close,
    OpenBracket,
    CloseBracket,
    Comma,
    Colon,
    Ellipsis,
    Dot,
}

/// Longer ones first.
const SYMBOLS: [(&str, Symbol); 25] = [
    ("...", Symbol::Ellipsis),
    ("**", Symbol::Power),
    ("==", Symbol::Equal),
    ("!=", Symbol::NotEqual),
    ("<=", Symbol::LessEqual),
    (">=", Symbol::GreaterEqual),
    ("+", Symbol::Plus),
    ("-", Symbol::Minus),
    ("*", Symbol::Star),
    ("/", Symbol::Slash),
    ("%", Symbol::Percent),
    ("@", Symbol::At),
    ("<", Symbol::Less),
    (">", Symbol::Greater),
    ("&", Symbol::And),
    ("|", Symbol::Or),
    ("~", Symbol::Not),
    ("=", Symbol::Assign),
    ("(", Symbol::Open),
    (")", Symbol::Close),
    ("[", Symbol::OpenBracket),
    ("]", Symbol::CloseBracket),
    (",", Symbol::Comma),
    (":", Symbol::Colon),
    (".", Symbol::Dot),
];

impl TokenKind<'_> {
    /// In words, for errors.
    pub(super) fn describe(&self) -> String {
        match self {
            TokenKind::Name(name) => format!("{name:?}"),
            TokenKind::Number(Scalar::Int(number)) => number.to_string(),
            TokenKind::Number(number) => number.as_f64().to_string(),
            TokenKind::Text(text) => format!("{text:?}"),
            TokenKind::Symbol(symbol) => {
                let text = SYMBOLS.iter().find(|(_, known)| known == symbol).map_or("?", |(text, _)| text);
                format!("{text:?}")
            }
            TokenKind::End => "the end".to_owned(),
        }
    }
}

/// All tokens; the last one is the end. Or where there is something else.
pub(super) fn split(text: &str) -> Result<Vec<Token<'_>>, (usize, String)> {
    let mut tokens = Vec::new();
    let mut at = 0;
    while let Some(first) = text[at..].chars().next() {
        let rest = &text[at..];
        if first.is_whitespace() {
            at += first.len_utf8();
            continue;
        }
        let (kind, length) = if first.is_ascii_digit() || (first == '.' && starts_with_digit(&rest[1..])) {
            number(rest).map_err(|why| (at, why))?
        } else if first.is_alphabetic() || first == '_' {
            let is_part = |c: char| c.is_alphanumeric() || c == '_';
            let length = rest.find(|c| !is_part(c)).unwrap_or(rest.len());
            (TokenKind::Name(&rest[..length]), length)
        } else if first == '"' || first == '\'' {
            let Some(length) = rest[1..].find(first) else { return Err((at, "a quote that is not closed".to_owned())) };
            (TokenKind::Text(&rest[1..=length]), length + 2)
        } else {
            let symbol = SYMBOLS.iter().find(|(text, _)| rest.starts_with(text));
            let Some((text, symbol)) = symbol else { return Err((at, format!("{first:?} means nothing here"))) };
            (TokenKind::Symbol(*symbol), text.len())
        };
        tokens.push(Token { kind, at });
        at += length;
    }
    tokens.push(Token { kind: TokenKind::End, at: text.len() });
    Ok(tokens)
}

fn starts_with_digit(text: &str) -> bool {
    text.starts_with(|c: char| c.is_ascii_digit())
}

/// A number, and how long it is: `3`, `3.5`, `.5`, `3.`, `1e-5`, `1_000`.
fn number(text: &str) -> Result<(TokenKind<'_>, usize), String> {
    let digits = |from: usize| {
        let is_part = |c: char| c.is_ascii_digit() || c == '_';
        text[from..].find(|c| !is_part(c)).map_or(text.len(), |length| from + length)
    };
    let mut end = digits(0);
    let mut is_float = false;
    // `3.sum()` would be a call.
    let is_point =
        text[end..].starts_with('.') && !text[end + 1..].starts_with(|c: char| c.is_alphabetic() || c == '.');
    if is_point {
        is_float = true;
        end = digits(end + 1);
    }
    if let Some(exponent) = text[end..].strip_prefix(['e', 'E']) {
        let sign = usize::from(exponent.starts_with(['-', '+']));
        if starts_with_digit(&exponent[sign..]) {
            is_float = true;
            end = digits(end + 1 + sign);
        }
    }
    let plain = text[..end].replace('_', "");
    let wrong = || format!("{:?} is not a number", &text[..end]);
    if !is_float && let Ok(value) = plain.parse() {
        return Ok((TokenKind::Number(Scalar::Int(value)), end));
    }
    let value: f64 = plain.parse().map_err(|_| wrong())?;
    Ok((TokenKind::Number(Scalar::Float(value)), end))
}

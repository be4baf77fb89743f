//! Parts of a request as routes take them. As axum's own, but what does not fit is refused in our own shape, with a
//! kind. And numbers as JSON has them.

use axum::extract::{FromRequestParts, rejection};
use http::request::Parts;
use serde::de::{DeserializeOwned, Error};
use serde::{Deserialize, Deserializer};

use crate::error::ApiError;

/// What the pattern of a route left open.
#[derive(Debug)]
pub(crate) struct Path<T>(pub T);

/// What follows the `?`.
#[derive(Debug)]
pub(crate) struct Query<T>(pub T);

impl<T: DeserializeOwned + Send, S: Send + Sync> FromRequestParts<S> for Path<T> {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let wrong = |e: rejection::PathRejection| ApiError::bad_request("invalid_args", format!("the path: {e}"));
        axum::extract::Path::from_request_parts(parts, state).await.map(|path| Path(path.0)).map_err(wrong)
    }
}

impl<T: DeserializeOwned + Send, S: Send + Sync> FromRequestParts<S> for Query<T> {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let wrong = |e: rejection::QueryRejection| ApiError::bad_request("invalid_args", format!("the query: {e}"));
        axum::extract::Query::from_request_parts(parts, state).await.map(|query| Query(query.0)).map_err(wrong)
    }
}

/// The largest `f64` below which every whole number is one.
const WHOLE_F64_MAX: f64 = 9_007_199_254_740_992.0;

/// A whole number. JSON has one kind of number: `3.0` is an integer too, by JSON Schema and to many who write JSON.
pub(crate) fn whole<'de, D: Deserializer<'de>, T: TryFrom<u64>>(field: D) -> Result<T, D::Error> {
    let number = serde_json::Number::deserialize(field)?;
    let is_whole = |f: &f64| f.fract() == 0.0 && (0.0..=WHOLE_F64_MAX).contains(f);
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "checked above")]
    let value = number.as_u64().or_else(|| number.as_f64().filter(is_whole).map(|f| f as u64));
    let fits = value.and_then(|value| T::try_from(value).ok());
    fits.ok_or_else(|| Error::custom(format!("{number} is not a whole number of this size")))
}

/// The same where it may be absent or null.
pub(crate) fn whole_if_any<'de, D: Deserializer<'de>, T: TryFrom<u64>>(field: D) -> Result<Option<T>, D::Error> {
    struct WholeNumber<T>(T);
    impl<'de, T: TryFrom<u64>> Deserialize<'de> for WholeNumber<T> {
        fn deserialize<D: Deserializer<'de>>(field: D) -> Result<Self, D::Error> {
            whole(field).map(WholeNumber)
        }
    }
    Ok(Option::<WholeNumber<T>>::deserialize(field)?.map(|whole| whole.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_numbers_however_they_are_written() {
        #[derive(Deserialize)]
        struct Fields {
            #[serde(deserialize_with = "whole")]
            a: u32,
            #[serde(default, deserialize_with = "whole_if_any")]
            b: Option<u64>,
        }
        let read = |text: &str| serde_json::from_str::<Fields>(text).map(|f| (f.a, f.b)).ok();
        assert_eq!(read(r#"{"a":3.0,"b":4}"#), Some((3, Some(4))));
        assert_eq!(read(r#"{"a":0,"b":null}"#), Some((0, None)));
        assert_eq!(read(r#"{"a":1e3,"b":18446744073709551615}"#), Some((1000, Some(u64::MAX))));
        for bad in
            [r#"{"a":-1}"#, r#"{"a":1.5}"#, r#"{"a":4294967296}"#, r#"{"a":"1"}"#, r#"{"a":null}"#, r#"{"a":1e300}"#]
        {
            assert_eq!(read(bad), None, "{bad}");
        }
    }
}

//! Parts of a request as routes take them. As axum's own, but what does not fit is refused in our own shape, with a kind.

use axum::extract::{FromRequestParts, rejection};
use http::request::Parts;
use serde::de::DeserializeOwned;

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

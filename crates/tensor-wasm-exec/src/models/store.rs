//! Adding and removing models. What a file says of itself is checked before it becomes a model: a header that lies is
//! refused with what is wrong, so that whoever opens a model later meets no surprise but a damaged disk.

use std::fs::File;
use std::sync::Arc;

use tensor_wasm_tensor::io::SafetensorsHeader;

use super::{HEADER_BYTES_MAX, complaint};
use crate::Runtime;
use crate::catalog::upload::{Upload, UploadKind, Uploaded};
use crate::catalog::{AddedModel, ModelRecord, SourceError, check_name};
use crate::failure::{Bug, Failure, Rejection};

/// Headers that are parsed at once, so that their memory is bounded whoever adds how many models.
pub(crate) const INSPECTIONS_MAX: usize = 2;

impl Runtime {
    /// Begins to receive a file for [`Runtime::add_model`], of at most the size that its tenant may add.
    pub fn upload_model(&self, tenant: &str) -> Result<Upload, Rejection> {
        let bytes_max = UploadKind::Model.bytes_max(&self.config.limits_of(tenant));
        Upload::begin(&self.catalog.files, UploadKind::Model, bytes_max)
    }

    /// Whether a tenant may add a model of so many bytes: asked before it is sent, and again by [`Runtime::add_model`].
    pub fn check_model_room(&self, tenant: &str, name: &str, bytes: u64) -> Result<(), Rejection> {
        check_name(name)?;
        self.catalog.check_model_room(tenant, name, bytes, &self.admission.account(tenant).limits)
    }

    /// Keeps a safetensors file under a name, in the place of what had the name before. Calls that begin after this
    /// see it. Call it on the background runtime.
    pub async fn add_model(&self, tenant: &str, name: &str, upload: Uploaded) -> Result<AddedModel, Failure> {
        self.check_model_room(tenant, name, upload.bytes() as u64)?;
        let (upload, tensors) = {
            let _turn = self.inspections.acquire().await;
            let inspected = self.background.spawn_blocking(move || inspect(&upload).map(|tensors| (upload, tensors)));
            inspected.await.map_err(|e| Bug(e.to_string()))??
        };
        let limits = &self.admission.account(tenant).limits;
        let added = self.catalog.add_model(tenant, name, upload, tensors, limits).await?;
        if let Some(old) = added.replaced.as_ref().filter(|old| old.hash != added.model.hash) {
            self.changed(old).await;
        }
        Ok(added)
    }

    /// Removes a model. Unless `force`, not one that a serving revision names. Who has it open keeps it until then.
    pub async fn remove_model(&self, tenant: &str, name: &str, force: bool) -> Result<(), Rejection> {
        let removed = self.catalog.remove_model(tenant, name, force).await?;
        self.changed(&removed).await;
        Ok(())
    }

    /// A model is another file now, or none: instances that may have opened the old one serve no later call.
    async fn changed(&self, old: &ModelRecord) {
        self.models.forget(&old.tenant, &old.hash);
        for function in self.catalog.users_of_model(&old.tenant, &old.name) {
            if let Err(error) = self.catalog.renew(&function).await {
                tracing::error!(%error, function = function.name, "could not renew a function whose model changed");
            }
            self.pool.forget(&function.id);
        }
    }

    /// Checks every model's file against its hash, and removes those that are nobody's.
    pub(crate) async fn scrub_models(&self) {
        self.catalog.sweep_models();
        for model in self.catalog.models_of_all().iter().filter(|model| model.quarantined.is_none()) {
            if self.admission.is_closed() {
                return;
            }
            let (catalog, hash) = (self.catalog.clone(), model.hash.clone());
            let checked = self.background.spawn_blocking(move || catalog.check_model(&hash)).await;
            if let Ok(Err(SourceError::Damaged(why))) = checked {
                quarantine(&self.catalog, &self.metrics, model, &why).await;
            }
        }
    }
}

/// Sets a damaged file aside and marks the models that it was.
pub(super) async fn quarantine(
    catalog: &Arc<crate::catalog::Catalog>,
    metrics: &crate::metrics::Metrics,
    model: &ModelRecord,
    why: &str,
) {
    tracing::error!(tenant = model.tenant, model = model.name, why, "a model's file is damaged");
    if catalog.quarantine_model(&model.hash, super::cache::CHANGED).await {
        metrics.quarantined.inc();
    }
}

/// How many tensors a file holds, if all that it says is true.
fn inspect(upload: &Uploaded) -> Result<usize, Rejection> {
    let storage = |e: std::io::Error| Rejection::Storage { why: e.to_string() };
    let file = File::open(upload.path()).map_err(storage)?;
    let header = SafetensorsHeader::read(&file, upload.bytes() as u64, HEADER_BYTES_MAX)
        .and_then(|header| header.check_elements(&file).map(|()| header));
    match header {
        Ok(header) => Ok(header.tensors().len()),
        Err(error) => Err(Rejection::InvalidModel { why: complaint(&error) }),
    }
}

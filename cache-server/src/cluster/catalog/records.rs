//! The keys of registrations in etcd, and their values.

use super::CatalogError;
use crate::{
    cluster::{KeyValue, Keys, from_text, to_text},
    tenancy::state::Registration,
};
use fletch_core::{DatasetName, Domain, Tenant};
use serde::{Deserialize, Serialize};

/// A registered dataset.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DatasetRecord {
    #[serde(flatten)]
    pub registration: Registration,
    /// The content bytes of its largest known version.
    pub bytes: u64,
}

/// The mark of a tenant, which is written with every change of its datasets. Only its revision counts.
#[derive(Debug, Serialize, Deserialize)]
pub struct TenantRecord {}

/// What a member has executed.
#[derive(Debug, Serialize, Deserialize)]
pub struct SeenRecord {
    /// The revision of etcd.
    pub revision: u64,
}

/// How the revisions of etcd count, where etcd was restored.
///
/// The *position* of the datasets is the revision of their last change in etcd and `offset`. It only grows,
/// also where etcd goes back to an earlier revision.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PositionRecord {
    pub offset: u64,
    /// The position of the server that writes its datasets back, while it does so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub correcting: Option<u64>,
}

/// A member that knows later datasets than etcd.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClaimRecord {
    /// The position of its datasets.
    pub position: u64,
}

/// What a key below `data/` is about.
#[derive(Debug, PartialEq, Eq)]
pub enum DataKey {
    Dataset(Domain, DatasetName),
    Tenant(Tenant),
    Position,
    /// The key of a newer build.
    Unknown,
}

pub fn dataset_key(keys: &Keys, domain: &Domain, name: &DatasetName) -> String {
    format!("{}datasets/{domain}/{name}", keys.data())
}

pub fn tenant_key(keys: &Keys, tenant: &Tenant) -> String {
    format!("{}tenants/{tenant}", keys.data())
}

pub fn position_key(keys: &Keys) -> String {
    format!("{}position", keys.data())
}

/// Reads the record of the position.
///
/// # Errors
/// [`CatalogError::Record`].
pub fn read_position(kv: &KeyValue) -> Result<PositionRecord, CatalogError> {
    let bad = |why: String| CatalogError::Record(String::from_utf8_lossy(&kv.key).into_owned(), why);
    from_text(&kv.value).map_err(bad)
}

pub fn parse_key(keys: &Keys, key: &[u8]) -> DataKey {
    let key = String::from_utf8_lossy(key);
    let parts: Vec<&str> = key.strip_prefix(&keys.data()).unwrap_or_default().split('/').collect();
    match parts[..] {
        ["datasets", domain, name] => match (Domain::new(domain), DatasetName::new(name)) {
            (Ok(domain), Ok(name)) => DataKey::Dataset(domain, name),
            _ => DataKey::Unknown,
        },
        ["position"] => DataKey::Position,
        ["tenants", tenant] => Tenant::new(tenant).map_or(DataKey::Unknown, DataKey::Tenant),
        _ => DataKey::Unknown,
    }
}

/// Reads the record of a dataset.
///
/// # Errors
/// [`CatalogError::Record`], also for a record of another dataset than its key says.
pub fn read_dataset(
    kv: &KeyValue,
    domain: &Domain,
    name: &DatasetName,
) -> Result<DatasetRecord, CatalogError> {
    let bad = |why: String| CatalogError::Record(String::from_utf8_lossy(&kv.key).into_owned(), why);
    let record: DatasetRecord = from_text(&kv.value).map_err(bad)?;
    if record.registration.domain == *domain && record.registration.dataset.name == *name {
        return Ok(record);
    }
    Err(bad("it is the record of another dataset".to_owned()))
}

pub fn dataset_text(registration: &Registration, bytes: u64) -> Vec<u8> {
    to_text(&DatasetRecord { registration: registration.clone(), bytes })
}

#[cfg(test)]
mod tests {
    use super::*;
    use fletch_api::Dataset;

    #[test]
    fn records_have_fixed_texts() {
        let keys = Keys::new("prod");
        let (domain, name) = (Domain::new("a").expect("name"), DatasetName::new("set").expect("name"));
        let key = dataset_key(&keys, &domain, &name);
        assert_eq!(key, "/fletch/prod/data/datasets/a/set");
        assert_eq!(parse_key(&keys, key.as_bytes()), DataKey::Dataset(domain.clone(), name.clone()));
        let tenant = Tenant::new("t").expect("name");
        assert_eq!(parse_key(&keys, tenant_key(&keys, &tenant).as_bytes()), DataKey::Tenant(tenant.clone()));
        assert_eq!(parse_key(&keys, position_key(&keys).as_bytes()), DataKey::Position);
        let position = PositionRecord { offset: 9, correcting: None };
        assert_eq!(String::from_utf8_lossy(&to_text(&position)), r#"{"format":1,"offset":9}"#);
        for foreign in ["/fletch/prod/data/jobs/x", "/fletch/prod/data/datasets/a/b/c", "/other", "\u{fffd}"]
        {
            assert_eq!(parse_key(&keys, foreign.as_bytes()), DataKey::Unknown, "{foreign}");
        }
        let dataset = Dataset {
            name: name.clone(),
            uri: "s3://b/p".into(),
            tables: "s3://b/t".into(),
            registered_ns: u64::MAX,
        };
        let registration = Registration { domain: domain.clone(), tenant, dataset };
        let text = dataset_text(&registration, 7);
        assert_eq!(
            String::from_utf8_lossy(&text),
            concat!(
                r#"{"format":1,"domain":"a","tenant":"t","name":"set","uri":"s3://b/p","tables":"s3://b/t","#,
                r#""registered_ns":18446744073709551615,"bytes":7}"#
            )
        );
        let kv = KeyValue { key: key.into(), value: text, mod_revision: 3 };
        let read = read_dataset(&kv, &domain, &name).expect("a record");
        assert_eq!(read, DatasetRecord { registration, bytes: 7 });
        let other = DatasetName::new("other").expect("name");
        assert!(matches!(read_dataset(&kv, &domain, &other), Err(CatalogError::Record(..))));
    }
}

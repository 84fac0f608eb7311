//! Tests the promises of origins over a directory, an emulator and real servers.

mod answers;
mod aws;
mod backends;
mod contract;
mod etag_forms;
mod faults;
mod hung;
mod identity;
mod listings;
mod local;
mod side_by_side;

use fletch_origin::{Credentials, Origin, OriginConfig, OriginLimits, OriginUri, Origins};
use fletch_testkit::OriginEmulator;
use futures::TryStreamExt as _;
use std::time::Duration;

fn limits(io_timeout_ms: u64) -> OriginLimits {
    OriginLimits { io_timeout: Duration::from_millis(io_timeout_ms), ..OriginLimits::default() }
}

fn config(emulator: &OriginEmulator) -> OriginConfig {
    OriginConfig {
        prefix: emulator.uri(),
        endpoint: Some(emulator.endpoint()),
        credentials: Some(Credentials::Anonymous),
        allow_http: true,
        ..OriginConfig::default()
    }
}

fn origins(emulator: &OriginEmulator, limits: OriginLimits) -> Origins {
    Origins::new(vec![config(emulator)], limits).expect("a right configuration")
}

fn uri(text: &str) -> OriginUri {
    OriginUri::parse(text).expect("a URI")
}

async fn names(origin: &Origin, prefix: &str) -> Vec<String> {
    origin.list(prefix).map_ok(|meta| meta.path).try_collect().await.expect("a listing")
}

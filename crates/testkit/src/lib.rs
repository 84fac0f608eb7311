//! Tools for tests: seeds, datasets, an origin with faults, a proxy that corrupts responses, kernel traces.
//!
//! Must never: be a dependency outside tests and benchmarks, or depend on another crate of the project. So
//! its results are independent of the code under test. It panics, with the reason, where a test could not
//! continue.

pub mod dataset;
mod emulator;
pub mod fuse_trace;
mod rules;
pub mod scripted;
pub mod seeds;
mod serve;
pub mod servers;
mod tamper;
pub mod tls;

pub use emulator::{
    Api, Backing, Counts, Delimiters, Described, EmulatorConfig, Fault, HostStyle, KeyEncoding, KeyOrder,
    Latency, Manners, OriginEmulator, Outage, Paging, Refusal, TagForm, TimeForm, XmlForm,
};
pub use tamper::{Tamper, TamperProxy, Upstream};

//! What an administrator sees of a server.
//!
//! ```text
//! Prometheus ─▶ GET /metrics ──────▶ metrics ───▶ counters of every room
//! browser ────▶ GET /v1/dashboard ─▶ overview ──▶ the state now
//!                                        └──────▶ dashboard ─▶ the last hour, problems, longer histories
//! ```
//! - `metrics` writes what other rooms count. It counts nothing itself.
//! - `overview` reads the state for the admin page, and samples it for the last hour.
//! - `dashboard` keeps the last hour, says what is wrong, and asks a Prometheus for longer histories.

pub mod dashboard;
pub mod metrics;
pub mod overview;

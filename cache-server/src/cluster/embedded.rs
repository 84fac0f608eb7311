//! The cluster of a server that is alone: one view, which never changes.

use super::{ClusterState, Coordinator, view::ClusterView};
use fletch_core::MemberId;
use std::sync::Arc;
use tokio::sync::watch;

/// Returns the state of a server that is its only member.
pub fn open(id: MemberId, url: &str) -> ClusterState {
    let view = Arc::new(ClusterView::single(id.clone(), url.to_owned()));
    let (sender, views) = watch::channel(view);
    // Without its sender, a wait for another view would end at once.
    ClusterState::new(id, url.to_owned(), views, Coordinator::Embedded { _views: sender })
}

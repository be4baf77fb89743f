//! Recorded graphs of a device, whatever a backend makes of one: numbered, each owned by the stream that recorded it.

use std::collections::HashMap;

pub(super) struct GraphTable<G> {
    graphs: HashMap<u32, OwnedGraph<G>>,
    next_number: u32,
}

struct OwnedGraph<G> {
    stream: usize,
    graph: G,
}

impl<G> GraphTable<G> {
    pub(super) fn new() -> GraphTable<G> {
        GraphTable { graphs: HashMap::new(), next_number: 0 }
    }

    pub(super) fn add(&mut self, stream: usize, graph: G) -> u32 {
        let number = self.next_number;
        self.next_number = number.wrapping_add(1);
        self.graphs.insert(number, OwnedGraph { stream, graph });
        number
    }

    /// A graph of this stream; another's is not there.
    pub(super) fn get(&self, stream: usize, number: u32) -> Option<&G> {
        self.graphs.get(&number).filter(|owned| owned.stream == stream).map(|owned| &owned.graph)
    }

    pub(super) fn remove(&mut self, number: u32) -> Option<G> {
        self.graphs.remove(&number).map(|owned| owned.graph)
    }

    /// Takes out all graphs of the streams that `is_theirs` names.
    pub(super) fn remove_of(&mut self, is_theirs: impl Fn(usize) -> bool) -> Vec<G> {
        self.graphs.extract_if(|_, owned| is_theirs(owned.stream)).map(|(_, owned)| owned.graph).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_graph_is_its_streams_until_it_is_removed() {
        let mut table = GraphTable::new();
        let (a, b) = (table.add(1, "a"), table.add(2, "b"));
        assert_ne!(a, b);
        assert_eq!((table.get(1, a), table.get(2, b)), (Some(&"a"), Some(&"b")));
        assert_eq!((table.get(2, a), table.get(1, b)), (None, None), "another stream's");
        assert_eq!(table.remove_of(|stream| stream == 1), ["a"]);
        assert!(table.get(1, a).is_none() && table.remove(a).is_none());
        assert_eq!((table.remove(b), table.remove(b)), (Some("b"), None));
    }
}

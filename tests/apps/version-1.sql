-- A database of version 1, as the app of mlx_zip 0.1 made it: tests read it with today's code. Never change it.
PRAGMA journal_mode = WAL;
CREATE TABLE conversations (
    id TEXT PRIMARY KEY, title TEXT NOT NULL, created REAL NOT NULL, updated REAL NOT NULL, model TEXT,
    system TEXT NOT NULL, packs TEXT NOT NULL, sampling TEXT NOT NULL, draft TEXT NOT NULL, leaf TEXT);
CREATE TABLE messages (
    n INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE,
    conversation TEXT NOT NULL REFERENCES conversations(id) ON DELETE CASCADE,
    parent TEXT, role TEXT NOT NULL, text TEXT NOT NULL, reasoning TEXT NOT NULL, created REAL NOT NULL,
    state TEXT NOT NULL, reason TEXT, tokens TEXT, figures TEXT, learned TEXT NOT NULL, model TEXT, writer INTEGER);
CREATE INDEX messages_of ON messages (conversation, n);
CREATE INDEX running_messages ON messages (state) WHERE state = 'running';
CREATE TABLE pieces (
    n INTEGER PRIMARY KEY, message TEXT NOT NULL REFERENCES messages(id) ON DELETE CASCADE, piece TEXT NOT NULL);
CREATE INDEX pieces_of ON pieces (message, n);
CREATE VIRTUAL TABLE words USING fts5(text, content='messages', content_rowid='n', tokenize='trigram');
CREATE TRIGGER message_added AFTER INSERT ON messages WHEN new.state <> 'running' BEGIN
    INSERT INTO words (rowid, text) VALUES (new.n, new.text); END;
CREATE TRIGGER message_deleted AFTER DELETE ON messages WHEN old.state <> 'running' BEGIN
    INSERT INTO words (words, rowid, text) VALUES ('delete', old.n, old.text); END;
CREATE TRIGGER message_changed AFTER UPDATE OF text, state ON messages BEGIN
    INSERT INTO words (words, rowid, text) SELECT 'delete', old.n, old.text WHERE old.state <> 'running';
    INSERT INTO words (rowid, text) SELECT new.n, new.text WHERE new.state <> 'running'; END;
INSERT INTO conversations VALUES ('c1', 'Drei Wünsche', 1763800000.5, 1763800100.25, 'stories', '', '["chat"]', '{"temp": 0.7}', 'ein Entwurf', 'm3');
INSERT INTO messages VALUES (1, 'm1', 'c1', NULL, 'user', 'Erzähl mir ein Märchen.', '', 1763800001.0, 'whole', NULL, NULL, NULL, '[]', NULL, 4711);
INSERT INTO messages VALUES (2, 'm2', 'c1', 'm1', 'assistant', 'Es war einmal.', '', 1763800002.0, 'whole', NULL, '[{"t": "Es war", "id": 700, "p": ["Es", " war"], "o": "answer", "a": 12}, {"t": " einmal.", "id": 3}]', '{"base_tokens": 4, "steps": 2}', '[["Es", " war"]]', 'stories', 4711);
INSERT INTO messages VALUES (3, 'm3', 'c1', 'm1', 'assistant', 'Es war', '', 1763800003.0, 'running', NULL, NULL, NULL, '[]', 'stories', 999999999);
INSERT INTO pieces VALUES (1, 'm3', '{"text": " einmal ein", "tokens": []}');
INSERT INTO pieces VALUES (2, 'm3', '{"text": " Fischer.", "tokens": []}');
PRAGMA application_id = 1836737384;
PRAGMA user_version = 1;

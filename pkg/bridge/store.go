package bridge

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	evpn "github.com/opiproject/opi-api/network/evpn-gw/v1alpha1/gen/go"
	"go.etcd.io/bbolt"
	bolterrors "go.etcd.io/bbolt/errors"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

// store keeps what clients asked for across restarts, each write on the disk before it returns. The values are the
// API's own messages; of their status only TO_BE_DELETED counts.
type store struct{ db *bbolt.DB }

func openStore(path string) (*store, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return nil, fmt.Errorf("state: %w", err)
	}
	db, err := bbolt.Open(path, 0o600, &bbolt.Options{Timeout: 2 * time.Second})
	if errors.Is(err, bolterrors.ErrTimeout) {
		return nil, fmt.Errorf("state %s: in use, does another opi-bridge run?", path)
	}
	if err != nil {
		return nil, fmt.Errorf("state %s: %w", path, err)
	}
	err = db.Update(func(tx *bbolt.Tx) error {
		_, noNetworks := tx.CreateBucketIfNotExists([]byte(networkKind.bucket))
		_, noPorts := tx.CreateBucketIfNotExists([]byte(portKind.bucket))
		return errors.Join(noNetworks, noPorts)
	})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("state %s: %w", path, err), db.Close())
	}
	return &store{db: db}, nil
}

func (s *store) close() error { return s.db.Close() }

// put keeps an object. The error is a gRPC status.
func (s *store) put(k kind, id string, value proto.Message) error {
	data, err := proto.Marshal(value)
	if err == nil {
		err = s.db.Update(func(tx *bbolt.Tx) error { return tx.Bucket([]byte(k.bucket)).Put([]byte(id), data) })
	}
	if err != nil {
		return status.Errorf(codes.Internal, "state: %s %s: %v", k.bucket, id, err)
	}
	return nil
}

func (s *store) remove(k kind, id string) error {
	err := s.db.Update(func(tx *bbolt.Tx) error { return tx.Bucket([]byte(k.bucket)).Delete([]byte(id)) })
	if err != nil {
		return fmt.Errorf("state: %s %s: %w", k.bucket, id, err)
	}
	return nil
}

func (s *store) load() (map[string]*network, map[string]*port, error) {
	networks, ports := map[string]*network{}, map[string]*port{}
	err := s.db.View(func(tx *bbolt.Tx) error {
		lb, bp := &evpn.LogicalBridge{}, &evpn.BridgePort{}
		return errors.Join(
			forEach(tx, networkKind, lb, func(id string) {
				deleting := lb.GetStatus().GetOperStatus() == stateDeleting.network
				networks[id] = &network{object: object{deleting: deleting}, spec: lb.GetSpec()}
			}),
			forEach(tx, portKind, bp, func(id string) {
				deleting := bp.GetStatus().GetOperStatus() == stateDeleting.port
				ports[id] = &port{object: object{deleting: deleting}, spec: bp.GetSpec()}
			}))
	})
	if err != nil {
		return nil, nil, fmt.Errorf("state: %w", err)
	}
	return networks, ports, nil
}

// forEach reads each value of a bucket into the message, whose fields are made anew, and calls found.
func forEach(tx *bbolt.Tx, k kind, message proto.Message, found func(id string)) error {
	return tx.Bucket([]byte(k.bucket)).ForEach(func(id, data []byte) error {
		if err := proto.Unmarshal(data, message); err != nil {
			return fmt.Errorf("%s %s: %w", k.bucket, id, err)
		}
		found(string(id))
		return nil
	})
}

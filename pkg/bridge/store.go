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
	"google.golang.org/protobuf/proto"
)

// store keeps what clients asked for across restarts, each write on the disk before it returns. The values are the
// API's own messages; of their status only TO_BE_DELETED counts.
type store struct{ db *bbolt.DB }

var (
	networksBucket = []byte("logical-bridges")
	portsBucket    = []byte("bridge-ports")
)

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
		_, err := tx.CreateBucketIfNotExists(networksBucket)
		if err != nil {
			return err
		}
		_, err = tx.CreateBucketIfNotExists(portsBucket)
		return err
	})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("state %s: %w", path, err), db.Close())
	}
	return &store{db: db}, nil
}

func (s *store) close() error { return s.db.Close() }

func (s *store) put(bucket []byte, id string, value proto.Message) error {
	data, err := proto.Marshal(value)
	if err != nil {
		return fmt.Errorf("state: %s %s: %w", bucket, id, err)
	}
	err = s.db.Update(func(tx *bbolt.Tx) error { return tx.Bucket(bucket).Put([]byte(id), data) })
	if err != nil {
		return fmt.Errorf("state: %s %s: %w", bucket, id, err)
	}
	return nil
}

func (s *store) remove(bucket []byte, id string) error {
	err := s.db.Update(func(tx *bbolt.Tx) error { return tx.Bucket(bucket).Delete([]byte(id)) })
	if err != nil {
		return fmt.Errorf("state: %s %s: %w", bucket, id, err)
	}
	return nil
}

func (s *store) load() (map[string]*network, map[string]*port, error) {
	networks, ports := map[string]*network{}, map[string]*port{}
	err := s.db.View(func(tx *bbolt.Tx) error {
		err := tx.Bucket(networksBucket).ForEach(func(id, data []byte) error {
			lb := &evpn.LogicalBridge{}
			if err := proto.Unmarshal(data, lb); err != nil {
				return fmt.Errorf("%s %s: %w", networksBucket, id, err)
			}
			deleting := lb.GetStatus().GetOperStatus() == evpn.LBOperStatus_LB_OPER_STATUS_TO_BE_DELETED
			networks[string(id)] = &network{spec: lb.GetSpec(), deleting: deleting}
			return nil
		})
		if err != nil {
			return err
		}
		return tx.Bucket(portsBucket).ForEach(func(id, data []byte) error {
			bp := &evpn.BridgePort{}
			if err := proto.Unmarshal(data, bp); err != nil {
				return fmt.Errorf("%s %s: %w", portsBucket, id, err)
			}
			deleting := bp.GetStatus().GetOperStatus() == evpn.BPOperStatus_BP_OPER_STATUS_TO_BE_DELETED
			ports[string(id)] = &port{spec: bp.GetSpec(), deleting: deleting}
			return nil
		})
	})
	if err != nil {
		return nil, nil, fmt.Errorf("state: %w", err)
	}
	return networks, ports, nil
}

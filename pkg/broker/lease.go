// SPDX-License-Identifier: Apache-2.0

package broker

import (
	"context"
	"fmt"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
)

var leaseKind = coordinationv1.SchemeGroupVersion.WithKind("Lease")

// lease is the Lease in a tenant's cluster. By its renewals the tenant knows that the broker is
// there, and by the answers the broker that the tenant is. Of two infra clusters the one that has
// it is the tenant's.
type lease struct {
	client   client.Client // asks the API server
	key      client.ObjectKey
	identity string
	duration time.Duration
	timeout  time.Duration

	last *coordinationv1.Lease // as it was seen last, nil if it was not
	// since when another's has not been renewed, by this clock: the two may differ
	others time.Time
}

// leaseRenewals is how many renewals may be missed.
const leaseRenewals = 4

func newLease(config *rest.Config, namespace string, o Options) (*lease, error) {
	scheme := runtime.NewScheme()
	if err := coordinationv1.AddToScheme(scheme); err != nil {
		return nil, err
	}

	mapper, err := restMapper(nil, nil)
	if err != nil {
		return nil, err
	}

	c, err := client.New(config, client.Options{Scheme: scheme, Mapper: mapper})
	return &lease{
		client: c, key: client.ObjectKey{Namespace: namespace, Name: v1alpha1.BrokerLease},
		identity: o.Identity,
		duration: leaseRenewals * o.RenewPeriod, timeout: o.RequestTimeout,
	}, err
}

// takenError says that another infra cluster has the Lease.
type takenError struct{ holder, lease string }

func (e *takenError) Error() string {
	return fmt.Sprintf("the broker of another infra cluster, %s, has Lease %s; end that one, or "+
		"delete the XPUTenant in one of the two",
		e.holder, e.lease)
}

// leaseAttempts is how often a renewal is tried at once when somebody else writes the Lease. An API
// server can say so forever.
const leaseAttempts = 3

// renew renews the Lease, or takes it if nobody has it.
func (l *lease) renew(ctx context.Context) (err error) {
	ctx, cancel := context.WithTimeout(ctx, l.timeout)
	defer cancel()

	for range leaseAttempts {
		if err = l.attempt(ctx); !apierrors.IsConflict(err) && !apierrors.IsNotFound(err) {
			return err
		}
		l.last = nil
	}

	return err
}

func (l *lease) attempt(ctx context.Context) error {
	if l.last == nil {
		var got coordinationv1.Lease
		err := l.client.Get(ctx, l.key, &got)
		if apierrors.IsNotFound(err) {
			return l.create(ctx)
		}
		if err != nil {
			return fmt.Errorf("Lease %s: %w", l.key, err)
		}
		l.last = &got
	}

	next := l.last.DeepCopy()
	if holder := ptr.Deref(next.Spec.HolderIdentity, ""); holder != l.identity && holder != "" {
		if l.others.IsZero() {
			l.others = time.Now()
		}
		if time.Since(l.others) < l.duration {
			return l.await(ctx, holder)
		}
		next.Spec.LeaseTransitions = new(ptr.Deref(next.Spec.LeaseTransitions, 0) + 1)
		next.Spec.AcquireTime = now()
	}

	next.Spec.HolderIdentity, next.Spec.RenewTime = &l.identity, now()
	next.Spec.LeaseDurationSeconds = new(int32(max(l.duration, time.Second).Seconds()))
	if err := l.client.Update(ctx, next); err != nil {
		return fmt.Errorf("renew Lease %s: %w", l.key, err)
	}

	l.last, l.others = next, time.Time{}
	return nil
}

// await looks whether the other holder has renewed the Lease.
func (l *lease) await(ctx context.Context, holder string) error {
	var got coordinationv1.Lease
	if err := l.client.Get(ctx, l.key, &got); err != nil {
		return fmt.Errorf("Lease %s: %w", l.key, err)
	}
	if got.ResourceVersion != l.last.ResourceVersion {
		l.last, l.others = &got, time.Now()
	}
	return &takenError{holder: holder, lease: l.key.String()}
}

func (l *lease) create(ctx context.Context) error {
	made := &coordinationv1.Lease{
		ObjectMeta: metav1.ObjectMeta{Namespace: l.key.Namespace, Name: l.key.Name},
		Spec: coordinationv1.LeaseSpec{
			HolderIdentity: &l.identity, AcquireTime: now(), RenewTime: now(),
			LeaseDurationSeconds: new(int32(max(l.duration, time.Second).Seconds())),
		},
	}

	if err := l.client.Create(ctx, made); err != nil {
		return fmt.Errorf("create Lease %s: %w", l.key, err)
	}

	l.last = made
	return nil
}
